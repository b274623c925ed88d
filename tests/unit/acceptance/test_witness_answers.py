"""The controller takes nothing but right values for an answer of a witness, whose clock is checked too."""

import copy
import math
import random
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import clock, typed, witness

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "acceptance"))
SEEDS = range(5)


def asked(family: str, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
    question = witness.FAMILIES[family]
    numbers = question.draw(random.Random(seed))
    return numbers, dict(question.answer(**copy.deepcopy(numbers)))


def places(values: Any, way: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    if not isinstance(values, list):
        return [way]
    return [place for number, value in enumerate(values) for place in places(value, (*way, number))]


def change(values: Any, way: tuple[int, ...], to: Any) -> None:
    for number in way[:-1]:
        values = values[number]
    values[way[-1]] = to(values[way[-1]])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", witness.FAMILIES)
def test_one_changed_value_anywhere_is_found(family, seed):
    _, right = asked(family, seed)
    assert witness.worst(right, copy.deepcopy(right)) == 0
    source = random.Random(seed)
    for name, values in right.items():
        largest = max(abs(value) for value in flat(values))
        for to in (lambda x, by=largest: x + by / 1000, lambda _: math.nan, lambda _: "1.0", lambda _: None):
            answer = copy.deepcopy(right)
            change(answer[name], source.choice(places(values)), to)
            assert not witness.worst(right, answer) <= 1


def flat(values: Any) -> list[float]:
    return [one for value in values for one in flat(value)] if isinstance(values, list) else [values]


@pytest.mark.parametrize("family", witness.FAMILIES)
def test_the_answer_of_another_question_is_found(family):
    answers = [asked(family, seed)[1] for seed in range(8)]
    for number, right in enumerate(answers):
        assert all(witness.worst(right, other) > 1 for other in answers[:number])


@pytest.mark.parametrize("family", witness.FAMILIES)
def test_an_answer_of_another_form_is_found(family):
    _, right = asked(family, 1)
    name = next(iter(right))
    shapes: list[Any] = [None, [], "", {}, {**right, "more": []}, {**right, name: []}, {**right, name: {}}]
    assert all(witness.worst(right, answer) == math.inf for answer in shapes)


def test_collectives_are_those_of_every_rank():
    numbers = witness.draw_collectives(random.Random(1), 3)
    right = witness.collectives(**numbers)
    for rank in range(3):
        other = copy.deepcopy(numbers)
        other["numbers"][rank][0] += 1
        assert witness.worst(right, witness.collectives(**other)) > 1


# Words of Python's and torch's own that the text uses for its names too.
THEIRS = {
    "betas", "cross_entropy", "device", "embedding", "eps", "layer_norm", "lr", "padding", "stride",
    "tensor",
}  # fmt: skip


def test_the_program_of_a_user_has_no_word_of_the_suites_and_is_another_each_time():
    """What recognises it by a text has nothing to look for; each answer is understood all the same."""
    questions = {family: asked(family, 0)[0] for family in witness.FAMILIES}
    one, other = (typed.typed(random.Random(seed), questions) for seed in (1, 2))
    assert {*witness.FAMILIES, "weights", "_told", "product"} <= one.names.keys()
    words = set(re.findall(r"[a-z_]\w*", " ".join([one.program, *one.arguments])))
    assert words & one.names.keys() == THEIRS
    assert set(one.names.values()) <= words
    assert not words & set(other.names.values())
    right = {family: asked(family, 0)[1] for family in witness.FAMILIES}
    names = one.names
    said = {names[family]: {names[n]: value for n, value in told.items()} for family, told in right.items()}
    assert one.understood(said) == right
    assert one.understood({"x": 1}) == {"x": 1}


SIZE = clock.Size(rows=3, width=8, checked=1)
SECONDS_A_STEP = 0.001


@dataclass
class Child:
    """A child that computes right, waits `outside_s` for a processor, and says `share` of its time."""

    outside_s: float
    share: float = 1.0
    now: float = 0.0
    seed: str = ""

    def __call__(self, function: str, **asked: object) -> object:
        if function.endswith(":prepare"):
            self.seed = str(asked["seed"])
            return None
        salt, steps = str(asked["salt"]), int(str(asked["steps"]))
        work_s = steps * SECONDS_A_STEP
        self.now += work_s + self.outside_s
        matrix = clock._packed(self.seed, SIZE.width)
        sums = [clock.row_sum(self.seed, salt, steps, row=row, matrix=matrix) for row in range(SIZE.rows)]
        return {"seconds": work_s * self.share, "sums": sums}


def found(child: Child, seed: int, monkeypatch: pytest.MonkeyPatch) -> clock.Clocked:
    monkeypatch.setattr(clock.time, "monotonic", lambda: child.now)
    return clock.clocked(random.Random(seed), child, SIZE)


def test_processes_compute_the_rows_that_one_computes():
    found = []
    for workers in (2, 1):
        with clock._rows("seed", clock.Size(rows=8, width=64, checked=3, workers=workers)) as sums_of:
            found.append(sums_of([7, 2, 7], "salt", 5))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2


@pytest.mark.parametrize("seed", range(20))
def test_a_busy_host_is_no_contradiction(seed, monkeypatch):
    drawn = random.Random(seed).uniform(0.0, 0.5)
    assert found(Child(outside_s=drawn), seed, monkeypatch).problem == ""


@pytest.mark.parametrize("seed", range(20))
def test_a_child_that_claims_to_be_faster_is_contradicted(seed, monkeypatch):
    source = random.Random(seed)
    child = Child(outside_s=source.uniform(0.0, 0.5), share=source.uniform(0.0, 0.49))
    assert "by the controller's clock" in found(child, seed, monkeypatch).problem


def test_a_child_cannot_have_worked_longer_than_it_took(monkeypatch):
    assert "by the controller's clock" in found(Child(outside_s=0.0, share=1.1), 0, monkeypatch).problem
