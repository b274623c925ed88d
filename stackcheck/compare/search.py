"""Find the step that breaks something between a good and a bad end.
In: a number of steps, and what answers whether a set of them passes. Out: a `Culprit`. Pure: what answers may
build images, or look them up.

First the steps are applied in order, and the search halves the range in which the answer changes. The step
that it finds is then applied alone: if that passes, an earlier step is needed as well, and is searched for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Callable

Outcome = Literal["passes", "fails", "unknown"]
Steps = frozenset[int]
Kind = Literal["good fails", "bad passes", "one", "together", "one of", "more"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What the search found.

    Attributes:
        kind: `one`: one step alone breaks it. `together`: two steps do, and neither of them alone. `one of`:
            one of several steps, between which nothing can be tested. `more`: a step that needs several
            others.
            `good fails` and `bad passes`: the ends are not what they were said to be.
        steps: The steps, the one that the search found first.
    """

    kind: Kind
    steps: tuple[int, ...] = ()


def walk(count: int, ask: Callable[[Steps], Outcome]) -> Culprit:
    """Search the steps 0 … count - 1.

    Args:
        count: How many steps lie between good (no step) and bad (all of them).
        ask: Whether the check passes with a set of steps; `unknown` if that cannot be built or decided.
    """
    if ask(frozenset()) != "passes":
        return Culprit(kind="good fails")
    if ask(frozenset(range(count))) != "fails":
        return Culprit(kind="bad passes")
    low, high = _edge(0, count, lambda end: ask(frozenset(range(end))))
    if high - low > 1:
        return Culprit(kind="one of", steps=tuple(range(low, high)))
    alone = "fails" if low == 0 else ask(frozenset({low}))
    if alone == "fails":
        return Culprit(kind="one", steps=(low,))
    return _partner(low, ask)


def _partner(found: int, ask: Callable[[Steps], Outcome]) -> Culprit:
    """The earlier step without which `found` passes."""
    low, high = _edge(0, found, lambda end: ask(frozenset((*range(end), found))) if end else "passes")
    if high - low == 1 and ask(frozenset({low, found})) == "fails":
        return Culprit(kind="together", steps=(found, low))
    return Culprit(kind="more", steps=(found, *range(high)))


def _edge(low: int, high: int, ask: Callable[[int], Outcome]) -> tuple[int, int]:
    """Two neighbours between which the answer changes: `low` passes and `high` fails.

    Places whose answer is unknown are left out, so the two may be further apart in the end.
    """
    unknown: set[int] = set()
    while places := [place for place in range(low + 1, high) if place not in unknown]:
        middle = min(places, key=lambda place: abs(2 * place - low - high))
        match ask(middle):
            case "passes":
                low = middle
            case "fails":
                high = middle
            case "unknown":
                unknown.add(middle)
    return low, high
