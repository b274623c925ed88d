"""What is printed of a drawn case is the case again; any other text is refused, by place and by value."""

# ruff: noqa: E501 - a table of faults reads in rows

import copy
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated_collective_cases as collectives
from workloads import generated_layout_cases as layouts
from workloads import generated_placement_cases as placements
from workloads.case_texts import CaseError

SIZE = 2
FAMILIES: dict[str, tuple[Callable[[int], str], Callable[[str], Any]]] = {
    "collectives": (lambda number: str(collectives.draw(0, number, SIZE, device="cpu")), functools.partial(collectives.of_json, size=SIZE)),
    "placements": (lambda number: str(placements.draw(0, number, SIZE)), functools.partial(placements.of_json, size=SIZE)),
    **{
        family: (
            lambda number, family=family: layouts.told(layouts.draw(family, 0, number, SIZE)),
            functools.partial(layouts.of_json, size=SIZE),
        )
        for family in ("layouts", "checkpoints")
    },
}  # fmt: skip
# No field may hold one of these; where one of them is right, it is left out.
WRONG = (None, "al_reduce", -7, 1.5, True, [], {}, [None], {"op": 1}, 10**30)


def places(value: Any, place: str = "case") -> Iterator[tuple[str, Any, Any]]:
    """Each place of a text: its name, what it is in, and its key there."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in pairs:
        name = f"{place}.{key}" if isinstance(value, dict) else f"{place}[{key}]"
        yield name, value, key
        yield from places(one, name)


def changed(text: str) -> Iterator[tuple[str, str]]:
    """The text with one place changed, taken out or renamed, and that place."""
    whole = json.loads(text)
    for number, (place, _, _) in enumerate(places(whole)):
        for wrong in (*WRONG, "gone", "renamed"):
            other = copy.deepcopy(whole)
            _, inside, key = next(itertools.islice(places(other), number, None))
            if wrong == "renamed" and isinstance(inside, dict):
                inside[f"{key}x"] = inside.pop(key)
            elif wrong == "gone":
                del inside[key]
            else:
                inside[key] = wrong
            yield place, json.dumps(other)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_case_is_what_is_printed_of_it_and_nothing_else_is_one(family: str) -> None:
    told, of_json = FAMILIES[family]
    refused = []
    for number in range(12):
        text = told(number)
        again = of_json(text)
        assert text == (str(again) if family in {"collectives", "placements"} else layouts.told(again))
        for place, other in changed(text):
            try:
                of_json(other)  # another value may be right
            except CaseError as error:
                refused.append((place, str(error)))
    assert len(refused) > 1000
    for place, error in refused:
        where, _, words = error.partition(": got ")
        of_groups = where.endswith(".group") and ".groups" in place  # that a call's number needs
        assert place.startswith(where) or where.startswith(place) or of_groups, (place, error)
        assert ", expected " in words


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", [0, 1, 9, -1])
def test_a_text_that_is_no_json_is_refused(family: str, cut: int) -> None:
    told, of_json = FAMILIES[family]
    with pytest.raises(CaseError, match=r"case: got .*expected JSON"):
        of_json(told(0)[:cut])
