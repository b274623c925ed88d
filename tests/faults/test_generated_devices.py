"""Drawn operators on a device: what a processor refuses is not sent, and a lost device is no refusal."""

import functools
import sys

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch
from torch.nn import functional

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_elsewhere, generated_inside, generated_judge, generated_operators
from workloads.generated_elsewhere import DeviceLostError
from workloads.generated_judge import Call

CPU = torch.device("cpu")


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processor in the part of a device, with the judge and the oracle as on a GPU."""
    monkeypatch.setattr(generated_elsewhere, "place", lambda: CPU)


def noted(runs: list[torch.dtype], function: object, x: torch.Tensor, *args: object) -> torch.Tensor:
    """Call a function, and note in which type it was asked."""
    runs.append(x.dtype)
    return function(x, *args)  # type: ignore[operator]


ONES, HIGH, ROWS = torch.ones(3), torch.full((3,), 1.5), torch.ones(2, 3)
DOMAINS = {
    "a place outside": (torch.take, (ONES, torch.tensor([5])), False),
    "a probability above 1": (functional.binary_cross_entropy, (HIGH, ONES), False),
    "a class that is not there": (functional.nll_loss, (ROWS, torch.tensor([0, 7])), False),
    "a row that is not there": (
        lambda one, at: functional.embedding(at, one),
        (ROWS, torch.tensor([2])),
        False,
    ),
    "all inside": (torch.take, (ONES, torch.tensor([2])), True),
}


@pytest.mark.parametrize("what", DOMAINS)
@pytest.mark.parametrize("alone", [False, True])
def test_what_a_processor_refuses_is_not_sent(what: str, alone: bool) -> None:
    """The call runs in float64, on the processor, and in its own type only if float64 takes it."""
    function, args, is_sent = DOMAINS[what]
    runs: list[torch.dtype] = []
    call = Call(
        functools.partial(noted, runs, function), args, {}, torch.float32, inside=True, alone=alone, on=CPU
    )
    said = generated._judged(call, 4.0)
    assert (torch.float32 in runs) is is_sent
    assert (said is not None) is is_sent
    assert torch.float64 in runs


def test_a_device_that_answers_nothing_more_ends_the_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler takes that for a refusal; a device that still answers has refused."""

    def asserts(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            raise RuntimeError("CUDA error: device-side assert triggered\nmore")
        return x

    def dead() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    call = Call(asserts, (torch.ones(3),), {}, torch.float32, inside=True, on=CPU)
    assert generated._judged(call, 4.0) == (
        float("inf"),
        "RuntimeError: CUDA error: device-side assert triggered",
    )
    monkeypatch.setattr(generated_elsewhere, "synchronize", dead)
    with pytest.raises(DeviceLostError, match=r"^RuntimeError: CUDA error: device-side assert triggered$"):
        generated._judged(call, 4.0)


def test_what_breaks_a_healthy_device_is_not_sent() -> None:
    runs: list[torch.dtype] = []
    call = Call(
        functools.partial(noted, runs, torch.exp), (torch.ones(3),), {}, torch.float32, inside=True, on=CPU
    )
    assert generated._judged(call, 4.0) is not None
    runs.clear()
    assert generated._judged(Call(**{**vars(call), "breaks": True}), 4.0) is None
    assert torch.float32 not in runs


def test_a_tensor_arrives_with_its_strides_and_its_surroundings() -> None:
    buffer = torch.arange(24.0)
    for view in (buffer.view(4, 6)[1:, ::2], buffer.view(4, 6).t(), buffer[3:4].expand(5), torch.tensor(2.0)):
        there = generated_elsewhere.placed(CPU, view)
        assert torch.equal(there, view)
        assert there.stride() == view.stride()
        assert there.storage_offset() == view.storage_offset()
        assert there.data_ptr() != view.data_ptr()
        assert there.untyped_storage().nbytes() == view.untyped_storage().nbytes()


@pytest.mark.usefixtures("elsewhere")
def test_places_of_equal_numbers_may_differ_on_a_device_and_no_others() -> None:
    """Of a row of zeros each place is the largest; of other rows one is."""
    rows = torch.tensor([[0.0, 0.0, 0.0], [1.0, 3.0, 2.0], [torch.inf, torch.inf, 1.0]])
    right = {0: (1, 1, 1), 1: (2, 1, 0), 2: (0, 1, 0), 3: (0, 2, 0)}
    told = {}
    for number, places in right.items():
        given = torch.tensor(places)
        call = Call(lambda x, given=given: x.argmax(1) if x.dtype is torch.float64 else given, (rows,), {},
                    torch.float32, on=CPU)  # fmt: skip
        told[number] = generated_judge.distance(call)
    assert told == {0: 0.0, 1: 0.0, 2: 0.0, 3: float("inf")}


@pytest.mark.usefixtures("elsewhere")
def test_drawn_cases_run_elsewhere_and_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call of a case has a place to run; float64 and sizes stay on the processor."""
    placed: list[torch.device] = []
    original = generated_elsewhere.placed
    monkeypatch.setattr(
        generated_elsewhere, "placed", lambda on, leaf: (placed.append(on), original(on, leaf))[1]
    )
    for number in range(12):
        case = generated_operators.draw(0, number)
        for _, call in generated_operators.forms_of(case):
            assert call.on == CPU
        assert (generated.margin("operators", 0, number) or 0) <= 1
    assert placed


def test_an_architecture_without_a_profile_has_no_wide_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generated_inside.arch, "name", lambda: "sm_999")
    generated_inside.profile.cache_clear()
    try:
        assert set(generated_inside.profile()["units"]) == set()
        assert generated_inside.gate("convolution float32") == generated_inside.GATES["float32"]
    finally:
        generated_inside.profile.cache_clear()
