"""Drawn operators on a device: what a processor refuses is not sent, and a lost device is no refusal."""

# ruff: noqa: E501 - a table of faults reads in rows

import contextlib
import functools
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

import drawn_faults

sys.path.insert(0, str(TESTS / "acceptance"))

from harness import models
from workloads import (
    generated,
    generated_doubts,
    generated_elsewhere,
    generated_inside,
    generated_judge,
    generated_known,
    generated_operators,
    generated_report,
    generated_trees,
)
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
    "a row that is not there": (lambda one, at: functional.embedding(at, one), (ROWS, torch.tensor([2])), False),
    "all inside": (torch.take, (ONES, torch.tensor([2])), True),
}  # fmt: skip


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
    assert generated._judged(call, 4.0)[:2] == (
        float("inf"),
        "RuntimeError: CUDA error: device-side assert triggered",
    )
    monkeypatch.setattr(generated_elsewhere, "synchronize", dead)
    with pytest.raises(DeviceLostError, match=r"^RuntimeError: CUDA error: device-side assert triggered$"):
        generated._judged(call, 4.0)


@pytest.mark.parametrize(("size", "is_refused"), [(0, True), (2, False)])
def test_a_refused_launch_for_no_element_is_a_refusal(size: int, is_refused: bool) -> None:
    """Of a result with elements it is a failure."""

    def launches(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float32:
            raise RuntimeError("CUDA error: invalid argument\nmore")
        return x[:size]

    said = generated._judged(Call(launches, (torch.ones(3),), {}, torch.float32, on=CPU), 4.0)
    assert (said is None) is is_refused


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


MEASURED = {
    one.stem: json.loads(one.read_text(encoding="utf-8")) for one in generated_inside.PROFILES.glob("*.json")
}
# Each that devices.json has, and some that it has not, of which one does not exist.
KNOWN_ARCHS = {row["arch"] for row in models.table() if row["arch"]}
UNMEASURED = sorted((KNOWN_ARCHS | {"gfx1100", "sm_75", "sm_999"}) - MEASURED.keys())
OF_NOBODY = ("exp float32", "mul float16", "special_zeta float32")  # kernels that no profile has


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Make this another architecture: its profile is read once only."""

    def take(name: str) -> None:
        monkeypatch.setattr(generated_inside.arch, "name", lambda: name)
        generated_inside.profile.cache_clear()

    yield take
    monkeypatch.undo()
    generated_inside.profile.cache_clear()


def gates(keys: Iterable[str]) -> dict[str, float]:
    """The gates of kernels and types on this architecture."""
    return {key: generated_inside.gate(key) for key in keys}


@pytest.mark.parametrize("name", UNMEASURED)
def test_an_architecture_that_nobody_measured_has_gates(name: str, on: Callable[[str], None]) -> None:
    """They are finite, none is narrower than on one that was measured, and what one needs this one may have."""
    keys = {key for one in MEASURED.values() for key in one["units"]} | {*OF_NOBODY}
    needed = []
    for one in MEASURED:
        on(one)
        needed.append(gates(keys))
    on(name)
    for key, gate in gates(keys).items():
        widest = max(one[key] for one in needed)
        assert widest <= gate <= generated_inside.TRANSFERS * widest, key
    known = generated_inside.profile()
    for kind in generated_inside.LISTS:
        # What breaks a processor says nothing of a device.
        of = [one for name, one in MEASURED.items() if (kind, name) != ("broken", "cpu")]
        every = set(itertools.chain(*(one[kind] for one in of)))
        assert every <= set(known[kind])
        assert kind == "unknown" or every == set(known[kind])


@pytest.mark.parametrize("name", MEASURED)
def test_an_architecture_that_was_measured_has_what_it_needs_alone(
    name: str, on: Callable[[str], None]
) -> None:
    on(name)
    assert generated_inside.profile() == MEASURED[name]
    for key in (*MEASURED[name]["units"], *OF_NOBODY):
        units = MEASURED[name]["units"].get(key, 0)
        assert generated_inside.gate(key) == max(generated_inside._gate(key), 4 * units)


def test_what_loses_all_in_float32_does_so_in_fewer_bits(on: Callable[[str], None]) -> None:
    on("sm_999")
    for key in generated_inside.profile()["unknown"]:
        name, dtype = key.split()
        halves = {f"{name} float16", f"{name} bfloat16"}
        assert dtype != "float32" or halves <= set(generated_inside.profile()["unknown"])


@pytest.mark.usefixtures("elsewhere")
def test_operators_are_drawn_where_nobody_measured(
    on: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healthy cases pass, most are judged, and a fault of one is seen."""
    on("gfx942")
    monkeypatch.setattr(generated, "SHRINKS", 1)
    report = generated.check("operators", 0, 12, 12)
    assert not report["failed"]
    assert report["judged"] >= 0.85 * report["drawn"]
    x = torch.linspace(0.5, 2, 64)
    call = Call(torch.mul, (x, x), {}, torch.float32, inside=True, on=CPU)
    with drawn_faults.Drawn("mul", torch.float32, "always", "it is off by 4096 roundings").mode():
        assert generated._judged(call, 4.0)[0] > 1


REPEATED = {
    "a copy to one place twice": (lambda x, at: x.index_copy(0, at, -x), [0, 0, 2], True),
    "a copy to each place": (lambda x, at: x.index_copy(0, at, -x), [1, 0, 2], False),
    "an addition to one place twice": (lambda x, at: x.index_add(0, at, -x), [0, 0, 2], False),
    "numbers put to one place twice": (lambda x, at: x.put(at, -x), [0, 0, 2], True),
    "numbers put and added": (lambda x, at: x.put(at, -x, accumulate=True), [0, 0, 2], False),
    "an assignment to one place twice": (lambda x, at: x.index_put((at,), -x), [0, 0, 2], True),
    "a product in one place twice": (lambda x, at: x.index_reduce(0, at, -x, "prod"), [0, 0, 2], False),
    "one number to one place twice": (lambda x, at: x.index_fill(0, at, 7.0), [0, 0, 2], False),
    "a product in place": (lambda x, at: x.clone().scatter_(0, at, -x, reduce="multiply"), [0, 0, 2], False),
    "numbers put in place": (lambda x, at: x.clone().index_put_((at,), -x), [2, 2, 2], True),
    "a reading of one place twice": (lambda x, at: x[at], [0, 0, 2], False),
    "one place twice, in two rows": (lambda x, at: x.expand(2, 3).scatter(1, at.expand(2, 3), -x.expand(2, 3)), [1, 1, 2], True),
    "each row's own places": (lambda x, at: x.expand(2, 3).scatter(1, at.expand(2, 3), -x.expand(2, 3)), [0, 1, 2], False),
}  # fmt: skip


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("what", REPEATED)
def test_what_is_written_to_one_place_twice_has_no_right_answer(what: str) -> None:
    """The processor leaves the last number there, and a device any of them; sums have one answer."""
    function, places, is_open = REPEATED[what]
    inside = generated_inside.Inside()
    generated_judge.results(
        Call(function, (torch.tensor([1.0, 2.0, 3.0]), torch.tensor(places)), {}, torch.float32),
        within=inside,
    )
    assert inside.is_open is is_open


@pytest.mark.usefixtures("elsewhere")
def test_no_place_among_many_equal_numbers_is_wrong_on_a_device() -> None:
    """Whichever place a device chooses among equal ones; in a row without them it has no choice."""
    x = torch.randint(0, 4, (500, 6), generator=torch.Generator().manual_seed(0)).bfloat16()
    x[7, 2:4] = torch.nan
    x[3] = torch.arange(6)
    last = 5 - x.flip(1).argmax(1)
    for change, expected in ((0, 0.0), (1, float("inf"))):
        given = last.clone()
        given[3] = x[3].argmin() if change else given[3]
        call = Call(lambda x, given=given: x.argmax(1) if x.dtype is torch.float64 else given, (x,), {},
                    torch.bfloat16, on=CPU)  # fmt: skip
        assert generated_judge.distance(call) == expected


def judged(func: Any, args: tuple[Any, ...], change: Callable[[Any], Any]) -> tuple[float, str]:
    """A kernel's units on a device that changes what it gives so, and what excuses more."""

    def on_a_device(*given: Any, **more: Any) -> Any:
        out = func(*given, **more)
        return change(out) if next(generated_trees.leaves(out)).dtype is torch.float32 else out

    call = generated_inside._call(func, args, {})
    assert call is not None
    units, excused = generated_inside._units(
        func,
        replace(call, function=on_a_device),
        on_a_device(*args),
        f"{generated_inside.name_of(func)} float32",
    )
    return units or 0.0, excused


@pytest.mark.usefixtures("elsewhere")
def test_another_place_is_that_of_an_equal_number() -> None:
    x, sort = torch.tensor([[2.0, 0.0, 0.0, 1.0]]), torch.ops.aten.sort.default
    for places, said in {
        (1, 2, 3, 0): (0.0, ""),
        (2, 1, 3, 0): (0.0, generated_inside.CHOSEN),
        (1, 2, 0, 3): (float("inf"), ""),
        (1, 2, 3, 4): (float("inf"), ""),
        (1, 2, 3, -1): (float("inf"), ""),
    }.items():
        assert judged(sort, (x,), lambda out, at=places: (out[0], torch.tensor([at]))) == said


class LastPlace(TorchDispatchMode):
    """Of equal numbers the last one is the largest."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As on some device."""
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.max.dim and out[0].dtype is torch.float32:
            out[1].copy_(args[0].shape[1] - 1 - args[0].flip(1).argmax(1))
        return out


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("fault", [0.0, 1.0])
def test_a_moved_gradient_is_a_doubt_and_a_wrong_output_is_none(fault: float) -> None:
    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.max(1).values + fault * (x.dtype is torch.float32)

    x = torch.tensor([[0.0, 0.0, -1.0]])  # zeros stay equal where numbers move by a rounding
    with LastPlace():
        said = generated._judged(Call(largest, (x,), {}, torch.float32, True, inside=True, on=CPU), 4.0)
    assert said is not None
    assert (said[0] > 1) is bool(fault)
    assert generated_inside.DOUBTED in said[1]


def test_what_the_processor_has_wrong_in_the_same_type_is_no_fault_of_a_device() -> None:
    """Rounded steps of bfloat16 are 60 units off where numbers cancel; what a device alone has is wrong."""
    linspace, place = torch.ops.aten.linspace.Tensor_Scalar, torch.device("cuda")
    call = Call(linspace, (torch.tensor(4.3), -3, 50), {"dtype": torch.bfloat16}, torch.float32)
    got, reference = generated_judge.results(call), generated_judge.Reference(call)
    assert generated_judge.distance(call, got, reference, 6) > 24
    assert generated_doubts.by_twin(call, got, reference, 60.0, 6) == 60.0
    assert generated_doubts.by_twin(replace(call, on=place), got, reference, 60.0, 6) <= 1
    for n in range(50):
        wrong = got[0].clone()
        wrong[n] += 0.5
        assert generated_doubts.by_twin(replace(call, on=place), [wrong], reference, 1e9, 6) > 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32])
def test_what_a_device_and_the_processor_have_wrong_alike_is_a_fault(dtype: torch.dtype) -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + (x.dtype is torch.float32)).to(dtype)

    call = Call(doubled, (torch.tensor([1.0, 2.0]),), {}, torch.float32, on=torch.device("cuda"))
    got = [doubled(*call.args)]
    assert generated_doubts.by_twin(call, got, generated_judge.Reference(call), 60.0, 6) == 60.0


X, ROW, ATEN = torch.rand(1, 1, 4, 2), torch.tensor([[1.0], [2.0], [torch.nan]]), torch.ops.aten
GIVEN, NEAREST = torch.arange(1.0, 17.0).view(1, 1, 16), ATEN.upsample_nearest1d_backward.default


def moved(out: torch.Tensor) -> torch.Tensor:
    """The last gradient goes one place too far."""
    return out.index_add(2, torch.tensor([24, 25]), torch.tensor([[[16.0, -16.0]]]))


LAST = torch.rand(2, 4, 5, 6).contiguous(memory_format=torch.channels_last)
POOLED, POOL = torch.rand(2, 4, 3, 3), ATEN.avg_pool2d_backward.default
LINE, EXACT = torch.arange(10924.0).view(1, 1, -1), ATEN._upsample_nearest_exact1d.default
NUMBERS, UNIQUE = torch.tensor([2.0, 1.0, torch.nan, 3.0]), ATEN.unique_dim.default


def shuffled(out: Any) -> Any:
    """The first result in the other order."""
    return (out[0].flip(0), *out[1:]) if isinstance(out, tuple) else out.flip(-1)


KNOWN = {  # a kernel, its arguments, what a device does; the last torch of which a known fault explains it
    "NaN is lost": (ATEN._cdist_forward.default, (ROW, ROW, 0.0, None), torch.nan_to_num, "2.11.0"),
    "of another norm": (ATEN._cdist_forward.default, (ROW, ROW, 1.0, None), torch.nan_to_num, ""),
    "NaN is lost on its way back": (ATEN._pdist_backward.default, (torch.ones(3), ROW, torch.inf, torch.tensor([1.0, torch.nan, torch.nan])), torch.nan_to_num, "2.11.0"),
    "with padding, channels last": (POOL, (POOLED, LAST, [3, 3], [2, 2], [1, 1], False, True, None), shuffled, "2.12.1"),
    "with padding, channels first": (POOL, (POOLED, LAST.contiguous(), [3, 3], [2, 2], [1, 1], False, True, None), shuffled, ""),
    "without padding": (POOL, (POOLED[..., :2, :2], LAST, [3, 3], [2, 2], [0, 0], False, True, None), shuffled, ""),
    "a place at a border": (EXACT, (LINE, [6554], None), lambda out: out, "9.0"),
    "a place that is not": (EXACT, (LINE, [6554], None), lambda out: out.roll(1, 2), ""),
    "a scale of two": (EXACT, (LINE, [2 * 10924], 2.0), lambda out: out.roll(1, 2), ""),
    "the order of NaN": (UNIQUE, (NUMBERS, 0, True, True, True), shuffled, "9.0"),
    "another order": (UNIQUE, (NUMBERS.nan_to_num(), 0, True, True, True), shuffled, ""),
    "one column": (ATEN._upsample_bilinear2d_aa.default, (X, [3, 1], False), torch.neg, "9.0"),
    "two columns": (ATEN._upsample_bilinear2d_aa.default, (X, [3, 2], False), torch.neg, ""),
    "nearest": (NEAREST, (GIVEN, [16], [1, 1, 27], 0.6), moved, "9.0"),
    "another place": (NEAREST, (GIVEN, [16], [1, 1, 27], 0.6), lambda out: moved(out).roll(1, 2), ""),
    "another scale": (NEAREST, (GIVEN, [16], [1, 1, 32], 0.5), moved, ""),
}  # fmt: skip


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("what", KNOWN)
def test_a_known_fault_is_passed_over_where_it_strikes_and_nowhere_else(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, args, change, until = KNOWN[what]
    for version in ("2.11.0", "2.12.1"):
        monkeypatch.setattr(torch, "__version__", version)
        units, excused = judged(kernel, args, change)
        assert (units < 4) is (version <= until)
        assert (excused == generated_inside.KNOWN) or not version <= until


@pytest.mark.parametrize(
    ("amx", "dtype", "k", "value", "on", "excused"),
    [
        (True, "bfloat16", 33, "nan", None, True),
        (True, "bfloat16", 3, "inf", None, True),
        (True, "bfloat16", 64, "nan", None, False),
        (True, "float16", 33, "nan", None, False),
        (True, "bfloat16", 33, "1", None, False),
        (True, "bfloat16", 33, "nan", torch.device("cuda"), False),
        (False, "bfloat16", 33, "nan", None, False),
    ],
)
def test_amx_is_excused_where_it_reads_the_row_beside(amx, dtype, k, *, value, on, excused, monkeypatch):
    """On processors alone: a device that does it has a fault of its own."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx, raising=False)
    a, b = (torch.randn(sizes).to(getattr(torch, dtype)) for sizes in ((40, k), (k, 20)))
    a[5, 1] = float(value)
    for kernel, args in (
        (ATEN.mm.default, (a, b)),
        (ATEN.addmm.default, (b.new_zeros(20), a, b)),
        (ATEN.bmm.default, (a[None], b[None])),
    ):
        call = Call(kernel, args, {}, a.dtype, on=on)
        right = [kernel(*(one.double() for one in args))]
        got = right[0].to(a.dtype)
        got[..., 4, :] = torch.nan
        got[..., 3, :] += 1
        found, passed = generated_known.passed_over(kernel, call, [got], right)
        assert passed is excused
        assert bool(found[0][..., 4, :].isfinite().all()) is excused
        assert found[0][..., 3, :].equal(got[..., 3, :])  # a number is never passed over


@pytest.mark.parametrize(
    ("numbers", "range_", "excused"),
    [
        ([233472.0], (0, 0), True),
        ([233472.0] * 3, (1, 1), True),
        ([200.0], (0, 0), False),
        ([233472.0, 1.0], (0, 0), False),
        ([233472.0], (0, 300000), False),
    ],
)
def test_bins_of_one_number_are_passed_over_where_a_half_has_no_range(numbers, range_, excused):
    x = torch.tensor(numbers, dtype=torch.bfloat16)
    call = Call(ATEN.histc.default, (x, 10, *range_), {}, x.dtype)
    right = [torch.histc(x.double(), 10, *range_)]
    got = right[0].roll(1).to(x.dtype)
    assert generated_known.passed_over(ATEN.histc.default, call, [got], right)[1] is excused


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(
    ("size", "dtype", "ends"), [(2049, "half", True), (2048, "half", False), (2049, "float", False)]
)
def test_what_ends_a_device_is_not_sent(size: int, dtype: str, ends: bool) -> None:
    x = getattr(torch.rand(size), dtype)()
    x[7] = torch.nan
    with contextlib.suppress(NotImplementedError) if ends else contextlib.nullcontext():
        generated_known.require_harmless(ATEN.mode.default, Call(ATEN.mode.default, (x,), {}, x.dtype))
        assert not ends


@pytest.mark.parametrize(
    ("first", "groups", "dtype", "last", "ends"),
    [
        (1, 4, torch.float16, True, True),
        (3, 4, torch.bfloat16, True, True),
        (2, 4, torch.float16, True, False),
        (1, 2, torch.float16, True, False),
        (1, 4, torch.float32, True, False),
        (1, 4, torch.float16, False, False),
    ],
)
def test_a_convolution_that_ends_a_device_is_not_sent(
    first: int, groups: int, dtype: torch.dtype, last: bool, ends: bool
) -> None:
    strides = (144, 1, 24, 4) if last else (144, 36, 6, 1)
    x = torch.ones(2 * 144 + 8, dtype=dtype).as_strided((2, 4, 6, 6), strides, first)
    args = (
        x,
        torch.ones(4, 4 // groups, 3, 3, dtype=dtype),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        groups,
    )
    kernel = ATEN.convolution.default
    with pytest.raises(NotImplementedError) if ends else contextlib.nullcontext():
        generated_known.require_harmless(kernel, Call(kernel, args, {}, dtype), args)


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("drawn", [True, False])
def test_each_window_of_a_drawn_pool_has_an_element(
    dims: int, drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the sizes are, the place of a maximum is inside. Of all of PyTorch's samples it is not."""
    name, pool = f"max_pool{dims}d", getattr(functional, f"max_pool{dims}d")
    if not drawn:
        monkeypatch.setattr(generated_operators, "_may_pool_nothing", lambda *_: False)
    samples = generated_operators._samples.__wrapped__(f"nn.functional.{name}", torch.float32)
    outside = 0
    for given in {str(one.kwargs): one.kwargs for one in samples}.values():
        for size in itertools.product((1, 2, 3, 5), repeat=dims):
            with contextlib.suppress(RuntimeError):  # a window may be larger than what there is
                _, places = pool(torch.rand(1, 1, *size), **{**given, "return_indices": True})
                outside += int((places >= math.prod(size)).sum()) + int((places < 0).sum())
    assert (outside == 0) is drawn


def with_its_own_seed(x: torch.Tensor, share: float) -> torch.Tensor:
    """Dropout as PyTorch's table calls what draws numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(42)
        return functional.dropout(x, share)


@pytest.mark.parametrize(("share", "says"), [(0.5, False), (0.0, True)])
def test_what_draws_by_a_seed_of_its_own_has_no_right_answer(share: float, says: bool) -> None:
    call = Call(with_its_own_seed, (torch.rand(64) + 1, share), {}, torch.float32)
    assert bool(generated_judge.Reference(call).moved) is says


def raises(words: str) -> None:
    raise RuntimeError(words)


@pytest.mark.parametrize(
    ("words", "fails"),
    [
        ("LoweringException: NotImplementedError: several places of one tensor", False),
        ("LoweringException: AssertionError: a size that is none", True),
    ],
)
def test_what_says_that_it_is_not_written_refuses(words: str, fails: bool) -> None:
    right = Call(torch.neg, (ONES,), {}, torch.float32)
    call = Call(lambda _: raises(words), (ONES,), {}, torch.float32, right=right, taken=True)
    assert (generated._judged(call, 4.0) is not None) is fails


def test_too_many_doubts_fail() -> None:
    report = {"family": "operators", "seed": 0, "drawn": 20, "least": 20, "judged": 20, "worst": 0.0,
              "failed": [], "doubted": 3, "left": {}}  # fmt: skip
    with pytest.raises(AssertionError, match="3 of 20 have a doubt"):
        generated_report.require(report, lambda *_, **__: None, 0.5)


def test_one_dropped_number_is_a_draw() -> None:
    """Two draws of one number are equal every second time; the state of the generator says that one drew."""
    for seed in range(8):
        call = Call(functional.dropout, (torch.ones(1),), {}, torch.float32, seed=seed)
        assert generated_judge.Reference(call).moved == []


def test_a_device_that_a_sample_names_is_not_where_float64_runs() -> None:
    """Where there is a GPU, some of PyTorch's samples name it; a word that is no device stays."""
    for name in ("cuda", "cuda:0", torch.device("cuda")):
        assert generated_elsewhere.brought_back(name) == CPU
        assert generated_elsewhere.placed(CPU, name) == CPU
    for word in ("mean", "nuc", 0, torch.float32):
        assert generated_elsewhere.brought_back(word) == word


@pytest.mark.usefixtures("elsewhere")
def test_a_slow_witness_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging asks float64 many times, so what takes it long once is not sent to the device."""
    runs: list[torch.dtype] = []
    monkeypatch.setattr(generated, "WITNESS_S", -1.0)
    call = Call(
        functools.partial(noted, runs, torch.exp), (torch.ones(3),), {}, torch.float32, inside=True, on=CPU
    )
    assert generated._judged(call, 4.0) is None
    assert torch.float32 not in runs


class Expanded(torch.autograd.Function):
    """A product with 3 whose gradient is twice too large if it arrives with stride 0."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        """Three times as much."""
        return x * 3

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        """The fault."""
        return gradient * (6 if 0 in gradient.stride() else 3)


@pytest.mark.parametrize("shape", [(4,), (3, 5), ()])
def test_a_gradient_that_arrives_expanded_is_drawn_and_its_faults_are_seen(shape: tuple[int, ...]) -> None:
    """One call in four gets it, in float64 too; a number alone has no strides."""
    operator = generated_operators.table()["sin"]
    sample = generated_operators._samples("sin", torch.float32)[0]
    drawn = [generated_operators._call(operator, torch.float32, sample, seed).alike for seed in range(40)]
    assert drawn.count(True) == 10
    for alike in (False, True):
        plain = Call(lambda x: x * 3, (torch.rand(shape),), {}, torch.float32, gradients=True, alike=alike)
        far = generated_judge.distance(replace(plain, function=Expanded.apply, right=plain))
        assert (far > 100) is (alike and shape != ())
