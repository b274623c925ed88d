"""What drawn families leave out is counted under a reason, and too much of it fails their check."""

import functools
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import (
    generated,
    generated_compiled,
    generated_compiled_items,
    generated_compiled_known,
    generated_doubts,
    generated_few,
    generated_inside,
    generated_judge,
    generated_left,
    generated_noise,
    generated_operators,
    generated_random,
    generated_report,
    generated_trees,
    generated_variations,
)
from workloads.generated_compiled import Job
from workloads.generated_judge import Call
from workloads.generated_noise import Case

CASES = (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 15, 17, 19, 20)  # of seed 0, the quick ones
ROWS = [("exp", "float32"), ("mul", "bfloat16"), ("nn.functional.dropout", "float32"), ("sum", "float32")]


def of_operators() -> dict[str, Any]:
    return generated.check("operators", 0, 0, 0, chosen=CASES) | {"least": len(CASES)}


def of_programs() -> dict[str, Any]:
    """A batch of programs, as the whole family reports it."""
    said = generated_compiled.run(Job(0, 0, "aot_eager"))
    told = {"family": "compiled", "seed": 0, "least": 1, "left": generated_left.summed([said["left"]])}
    return {**said, **told}


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows of the table in place of a batch."""
    monkeypatch.setattr(generated_compiled, "rows", lambda _: ROWS)


def require(report: dict[str, Any]) -> None:
    generated_report.require(report, lambda *_, **__: None, 0.5)


def reasons(report: dict[str, Any]) -> set[str]:
    return {reason for counts in report["left"].values() for reason in counts}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize(
    "family",
    ["operators", "sizes", "compiled", pytest.param("attention", marks=pytest.mark.slow)],
)
def test_every_case_is_judged_or_left_for_a_reason(family: str) -> None:
    drawn = {"operators": of_operators, "compiled": of_programs}
    report = drawn[family]() if family in drawn else generated.check(family, 0, 6, 6) | {"least": 6}
    require(report)
    assert sum(report["left"]["case"].values()) == report.get("asked", report["drawn"])
    assert not any("nobody" in reason for reason in reasons(report))


def refuse(*_: object, **__: object) -> None:
    raise RuntimeError("planted")


PLANTED = {
    "no operator takes another size": (generated_variations, "_resized", of_operators, "variation"),
    "no operator takes another place": (generated_operators, "_in_place", of_operators, "form in place"),
    "no program has surroundings": (generated_compiled_items, "_surrounded", of_programs, "surroundings"),
}


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("what", PLANTED)
def test_too_much_that_is_left_fails(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All cases are judged and none fails, but of most of them one part is not asked any more."""
    module, name, report_of, says = PLANTED[what]
    monkeypatch.setattr(module, name, refuse)
    report = report_of()
    assert not report["failed"]
    with pytest.raises(AssertionError, match=f"of each {says} too few"):
        require(report)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("error", [ValueError, KeyError])
def test_a_row_that_cannot_be_drawn_is_counted(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is a reason; what no operator refuses with is a failure. Neither is silent."""

    def broken(source: object, name: str, kind: str) -> object:
        if name == "mul":
            raise error("planted")
        return draw(source, name, kind)

    draw: Any = generated_compiled_items.draw
    monkeypatch.setattr(generated_compiled_items, "draw", broken)
    report = of_programs()
    refused = error is ValueError
    assert report["left"]["case"].get("drawing it is refused: ValueError", 0) == refused
    assert len(report["failed"]) == (not refused)
    assert sum(report["left"]["case"].values()) == len(ROWS)


def test_a_case_that_is_nowhere_fails() -> None:
    report = {"family": "sizes", "seed": 0, "drawn": 4, "least": 4, "judged": 3, "worst": 0.0, "failed": []}
    with pytest.raises(AssertionError, match="3 of 4 cases are judged or left for a reason"):
        require(report | {"left": {"case": {"judged": 3}}})


@pytest.mark.parametrize("part", ["_known", "distance", "moved", "of_kernel"])
@pytest.mark.parametrize("error", [TypeError, RuntimeError, AttributeError])
def test_a_judge_of_kernels_that_breaks_is_a_failure(part: str, error: type[Exception]) -> None:
    """Only float64 refuses a kernel: what else a judge raises would pass all that is wrong."""
    places = {"_known": generated_inside, "distance": generated_judge, "moved": generated_judge.Reference}
    kind = mock.PropertyMock if part == "moved" else mock.Mock
    call = Call(lambda x: x.cumsum(0) * 1.0, (torch.linspace(1, 2, 64),), {}, torch.float32, inside=True)
    wrong = mock.patch.object(
        generated_trees, "run", lambda kernel, args, kwargs: kernel(*args, **kwargs) * 1.1
    )
    place = places.get(part, generated_doubts)
    with wrong, mock.patch.object(place, part, kind(side_effect=error("it is broken"))):
        said = generated._judged(call, 4.0)
    assert said
    assert said[0] > 1


MODES = {
    "Few": generated_few.Few,
    "Inside": generated_inside.Inside,
    "Kernels": generated_compiled_known.Kernels,
    "Rounded": functools.partial(generated_doubts.Rounded, torch.float32, 0),
}


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("then", [torch.atanh, torch.asin, torch.special.log_ndtr])
def test_zeros_without_memory_end_no_process(name: str, then: Callable[..., torch.Tensor]) -> None:
    """The gradient of `sgn` is such a tensor, and below a dispatch mode kernels read it."""
    x = torch.linspace(0.1, 0.9, 16, requires_grad=True)
    with MODES[name]():
        (gradient,) = torch.autograd.grad(then(x).sgn().sum(), x)
    assert torch.equal(gradient, torch.zeros(16))


@pytest.mark.parametrize("part", ["_of_eager", "_of_itself", "_same", "_slope", "_beside"])
@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_judge_of_random_programs_that_breaks_is_a_failure(
    part: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked of the whole batch: no handler around the judge takes it for a refusal of the compiler."""
    monkeypatch.setattr(generated_compiled, "rows", lambda _: [("nn.functional.dropout", "float32")])
    monkeypatch.setattr(generated_random, part, mock.Mock(side_effect=error("it is broken")))
    said = generated_compiled.run(Job(0, 0, "aot_eager"))
    assert said["refused"] == []
    assert len(said["failed"]) == 1


NOISY = Case("dropout", "eager", "float32", 1, (64, 33, 3))


@pytest.mark.parametrize("part", ["read_back", "_apart", "_of_numbers", "_together", "known"])
@pytest.mark.parametrize("error", [TypeError, ValueError, IndexError])
def test_a_judge_of_noise_that_breaks_refuses_nothing(part: str, error: type[Exception]) -> None:
    broken = mock.patch.object(generated_noise, part, mock.Mock(side_effect=error("it is broken")))
    with broken, pytest.raises(error):
        generated_noise.asked(NOISY)


def test_what_torch_refuses_of_noise_is_a_refusal() -> None:
    refusing = mock.Mock(side_effect=TypeError("no"))
    with mock.patch.object(generated_noise, "program", refusing), generated_left.counted() as counts:
        assert generated_noise.asked(NOISY) is None
    assert counts[generated_left.CALL, "refused: TypeError"] == 1
