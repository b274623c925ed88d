"""Programs for a compiler: what is drawn, who judges them, and that drawn faults of a compiler are found."""

import dataclasses
import functools
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import compiled_power
import drawn_compiler_faults
from drawn_compiler_faults import Drawn

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import (
    generated_compiled,
    generated_compiled_items,
    generated_compiled_known,
    generated_doubts,
    generated_judge,
    generated_operators,
    generated_random,
)
from workloads.generated_compiled import Job
from workloads.generated_compiled_items import Item, Program, shares_unsaid, tried
from workloads.generated_judge import Call


def call_of(name: str, *args: torch.Tensor) -> Call:
    """A program of one operator, which nothing surrounds."""
    return generated_compiled_items._plain(name, Call(tuple, args, {}, torch.float32, gradients=True))


@pytest.mark.slow
def test_a_drawn_fault_of_a_compiler_is_found_and_nothing_else() -> None:
    """A step that is lost is, one of an operator that no program runs is not."""
    faults = [Drawn("update", "mul"), Drawn("kernel", "_pdist_forward", effect="it is 0")]
    found = compiled_power.measure(faults, [0], batches=4)
    assert [one.job is not None for one in found.values()] == [True, False]


def test_faults_of_one_seed_are_the_same_and_of_another_are_others() -> None:
    drawn = [drawn_compiler_faults.faults(seed, 20) for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    assert {one.kind for one in drawn_compiler_faults.faults(0, 200)} == set(drawn_compiler_faults.KINDS)


@pytest.mark.parametrize("off", [2.0**-6, 2.0**-12, 1.0])
def test_an_error_of_a_compiler_is_not_its_own_excuse(off: float) -> None:
    """Neither a whole gradient nor a share of it: float32 is exact to 2^-24, whatever type weights are of."""
    call = tried(call_of("exp", torch.linspace(0.5, 2, 64)))
    assert call is not None
    item, right = Item("exp", call), generated_judge.results(call)
    healthy = generated_compiled.judge(item, right)
    said = generated_compiled.judge(item, [right[0], right[1] * (1 - off)])
    assert healthy
    assert healthy[0] <= 1
    assert said
    assert said[0] > 1


def test_what_a_device_has_no_memory_for_is_not_judged() -> None:
    item = Item("exp", call_of("exp", torch.ones(3)))
    with mock.patch.object(generated_judge, "results", side_effect=torch.OutOfMemoryError("no memory")):
        assert generated_compiled.judge(item, [torch.ones(3)]) is None


@pytest.mark.parametrize("part", ["_roundings", "distance", "Reference.moved", "by_steps", "explained"])
@pytest.mark.parametrize("error", [TypeError, RuntimeError, AssertionError])
def test_a_judge_that_breaks_refuses_nothing(part: str, error: type[Exception]) -> None:
    """Only eager mode and float64 refuse a program; what raises beside them would pass all that is wrong."""
    call = tried(program_with("cumsum", NUMBERS, dim=1))
    assert call is not None
    got = [one * 1.001 for one in generated_judge.results(call)]
    modules = {"by_steps": generated_doubts, "explained": generated_compiled_known}
    *of, name = part.split(".")
    place = generated_judge.Reference if of else modules.get(name, generated_judge)
    kind = mock.PropertyMock if of else mock.Mock
    raising = kind(side_effect=error("it is broken"))
    with mock.patch.object(place, name, raising), pytest.raises(error):
        generated_compiled.judge(Item("cumsum", call), got)


def judged_with(call: Call, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> float | None:
    """How a judge finds what a compiler would have given: None where it passes over it."""
    call = tried(call)
    assert call is not None
    said = generated_compiled.judge(Item("it", call), change(generated_judge.results(call)))
    return None if said is None else said[0]


def program_with(name: str, x: torch.Tensor, **kwargs: Any) -> Call:
    return generated_compiled_items._plain(name, Call(tuple, (x,), kwargs, x.dtype, gradients=True))


def changed_later(call: Call) -> Call:
    program = generated_compiled_items.program_of(call)
    return dataclasses.replace(
        call, function=dataclasses.replace(program, elsewhere="changed for the caller")
    )


NUMBERS = torch.linspace(-3, 3, 27).reshape(3, 9)
HALVES = NUMBERS.bfloat16()
PADDED = {"stride": 3, "padding": 1, "ceil_mode": True}
NOT_A_NUMBER = torch.tensor([1.5, torch.inf, torch.nan])
POOL = functools.partial(program_with, "nn.functional.avg_pool1d", NUMBERS, kernel_size=4)
# A program, which of its results is off, and by what: as a healthy compiler has it, and as none may.
PASSED_OVER = {
    "amax": (program_with("amax", HALVES), 1, lambda one: one * torch.nan),
    "amax of rows": (program_with("amax", NUMBERS, dim=-1), 1, lambda one: one * 0),
    "largest of all": (program_with("norm", HALVES, p=float("inf")), 1, lambda one: one * torch.nan),
    "pool": (POOL(**PADDED), 1, lambda one: one / 2),
    "exponent": (program_with("frexp", NOT_A_NUMBER), 1, lambda one: one + 7),
    "gradient by an exponent": (program_with("frexp", NOT_A_NUMBER), 2, lambda one: one * torch.inf),
    "copy that is none": (changed_later(program_with("expand_copy", NUMBERS, size=(3, 9))), 0, torch.neg),
    "any": (program_with("any", NUMBERS, dim=()), 0, lambda one: one.any()),
    "rounded before": (program_with("var", torch.ones(64)), 0, lambda one: one + 3e-15),
    "order of equal ones": (program_with("argsort", torch.zeros(8)), 0, lambda one: one.flip(0)),
}  # fmt: skip
FAULTS = {
    "amax itself": (program_with("amax", HALVES), 0, lambda one: one * torch.nan),
    "amax goes elsewhere": (program_with("amax", HALVES), 1, lambda one: one.roll(1)),
    "a sum": (program_with("sum", HALVES), 1, lambda one: one * torch.nan),
    "pool itself": (POOL(**PADDED), 0, lambda one: one / 2),
    "a plain pool": (POOL(stride=3), 1, lambda one: one / 2),
    "an exponent of a number": (program_with("frexp", NUMBERS), 1, lambda one: one + 7),
    "gradient by a finite exponent": (program_with("frexp", NUMBERS), 2, lambda one: one * torch.inf),
    "copy that nobody changes": (program_with("expand_copy", NUMBERS, size=(3, 9)), 0, torch.neg),
    "no copy": (changed_later(program_with("neg", NUMBERS)), 0, torch.zeros_like),
    "any of no dimensions in its shape": (program_with("any", NUMBERS, dim=()), 0, torch.logical_not),
    "any of rows": (program_with("any", NUMBERS, dim=(0,)), 0, lambda one: one.any()),
    "a variance": (program_with("var", NUMBERS), 0, lambda one: one + 1e-3),
    "order of others": (program_with("argsort", torch.arange(8.0)), 0, lambda one: one.flip(0)),
}  # fmt: skip


@pytest.mark.parametrize("name", [*PASSED_OVER, *FAULTS])
def test_what_a_healthy_compiler_gets_wrong_excuses_nothing_else(name: str) -> None:
    """By its kernels and by how it is wrong."""
    call, place, wrong = {**PASSED_OVER, **FAULTS}[name]
    share = judged_with(call, lambda got: [*got[:place], wrong(got[place]), *got[place + 1 :]])
    assert (share is None or share <= 1) is (name in PASSED_OVER), share


SHARING = {
    "dropout of nothing": (lambda x: torch.nn.functional.dropout(x, 0.0, training=True), True),
    "dropout": (lambda x: torch.nn.functional.dropout(x, 0.5, training=True), False),
    "unsafe_split": (lambda x: torch.unsafe_split(x, 2), True),
    "unsafe_chunk": (lambda x: torch.unsafe_chunk(x, 2), True),
    "split": (lambda x: torch.split(x, 2), False),
    "a view": (lambda x: x[1:], False),
}


@pytest.mark.parametrize("what", SHARING)
def test_what_shares_memory_unsaid_is_known(what: str) -> None:
    """Of a tensor of its own, and of a view."""
    function, shares = SHARING[what]
    for x in (torch.ones(6), torch.ones(2, 6)[1]):
        call = Call(Program(what, function), (x, ((), {}), ((), {})), {}, torch.float32)
        assert shares_unsaid(call) is shares


def test_what_no_tracer_takes_is_not_drawn() -> None:
    """A result that depends on numbers."""
    x, other = torch.ones(3), torch.ones(3)
    for operator, args in ((torch.equal, (x, other)), (torch.nonzero, (x,)), (torch.exp, (x,))):
        program = Program("one", operator)
        call = Call(program, (args[0], (args[1:], {}), ((), {})), {}, torch.float32)
        assert (tried(call) is None) is (operator is not torch.exp)


@pytest.mark.slow
def test_what_is_summed_alone_is_drawn() -> None:
    """Its gradient is one number for all, which a compiler keeps with stride 0; and operands with gaps."""
    reducing, gaps = set(), False
    for number in range(200):
        one = generated_compiled_items.draw(random.Random(number), "slice_scatter", "float32")
        program = generated_compiled_items.program_of(one.call) if one else None
        if one and program:
            gaps = gaps or any(not given.is_contiguous() for given in one.call.tensors()[1:])
        if program and program.hidden:
            reducing.add("Reduction" in type(generated_operators.table()[program.partner]).__name__)
        if gaps and reducing == {False, True}:
            return
    pytest.fail(f"200 programs: gaps {gaps}, a reduction reads alone {reducing}")


@pytest.mark.parametrize("name", ["nn.functional.dropout", "bernoulli", "uniform"])
def test_what_draws_numbers_is_drawn_without_a_seed_of_its_own(name: str) -> None:
    """The table's own functions put the generator back."""
    found = [generated_compiled_items.draw(random.Random(n), name, "float32") for n in range(2)]
    assert any(one.draws for one in found if one)


class Again(torch.autograd.Function):
    """Dropout whose backward draws again."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        """Some of the numbers."""
        return by_mask(x)

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        """The fault."""
        return by_mask(gradient)


def by_mask(
    x: torch.Tensor, share: float = 0.75, alike: int = 1, seed: int | None = None, source: Any = None
) -> torch.Tensor:
    """Dropout, with faults."""
    if seed is not None:
        torch.default_generator.manual_seed(seed or time.perf_counter_ns())
    mask = torch.rand(x.numel() // alike, generator=source) < share
    return x * mask.repeat_interleave(alike).view(x.shape) / 0.75


def of_a_graph(apart: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Dropout recomputed on a GPU: forward and backward have a generator each, `apart` by their seeds."""
    forward, backward = list[torch.Generator](), list[torch.Generator]()

    def run(x: torch.Tensor) -> torch.Tensor:
        if not forward:
            torch._functorch._aot_autograd.runtime_wrappers.initialize_rng_states(1, apart, forward, backward)
        y = by_mask(x, source=backward[0])
        return y + (by_mask(x, source=forward[0]) - y).detach()

    return run


def seeded_once(_count: int, apart: int, *states: list[torch.Generator]) -> None:
    """Make the generators of a graph as torch does: from the processor's."""
    seed = int(torch.randint(2**62, ()))
    for n, one in enumerate(states):
        one.append(torch.Generator().manual_seed(seed + n * apart))


# A fault, and what is said of it where a compiler has it, and where eager mode has it too.
GRADIENT, SEED = "gradient is not that of the numbers", "the same seed gives other numbers"
WRONG: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "nothing": (by_mask, "", ""),
    "generators of its own": (of_a_graph(0), "", ""),
    "other generators in backward": (of_a_graph(1), GRADIENT, GRADIENT),
    "backward draws again": (Again.apply, GRADIENT, GRADIENT),
    "groups of four are alike": (functools.partial(by_mask, alike=4), "distributed", ""),
    "it keeps more": (functools.partial(by_mask, share=0.8), "distributed", "another share"),
    "each run has the same": (functools.partial(by_mask, seed=5), "again and again", ""),
    "no run has the same": (functools.partial(by_mask, seed=0), SEED, SEED),
}


@pytest.mark.parametrize("what", WRONG)
def test_numbers_that_are_drawn_wrong_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    wrappers = torch._functorch._aot_autograd.runtime_wrappers
    monkeypatch.setattr(wrappers, "initialize_rng_states", seeded_once, raising=False)
    dtype = torch.bfloat16 if "again" in what else torch.float32
    faulty, compiled, eager = WRONG[what]
    x = torch.linspace(0.5, 2, 4096).view(64, 64).to(dtype)
    for operator, words in ((functional.dropout, compiled), (lambda x, **_: faulty(x), eager)):
        program = Program("nn.functional.dropout", operator, (64, 64))
        call = Call(program, (x, ((), {"p": 0.25}), ((), {})), {}, dtype, gradients=True)
        with generated_random.own_generators():
            said = generated_random.judge(Item(program.name, call), lambda x, *_: (faulty(x),))
        assert said
        assert (said[0] > 1) is bool(words)
        assert words in said[1]


def test_other_numbers_under_recomputation_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Program("nn.functional.dropout", functional.dropout, (4096,), recomputed=True)
    call = Call(
        program, (torch.linspace(0.5, 2, 4096), ((), {}), ((), {})), {}, torch.float32, gradients=True
    )
    for keeps in (True, False):
        other = functools.partial(checkpoint, preserve_rng_state=keeps)
        monkeypatch.setattr(generated_compiled_items, "checkpoint", other)
        said = generated_random.judge(Item(program.name, call), program.compiled)
        assert said
        assert (said[0] > 1) is not keeps


# One in the usual half: with a wrong result, what fails is made smaller too, so most places are passed.
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("exp", True),
        pytest.param("exp", False, marks=pytest.mark.slow),
        pytest.param("nn.functional.rrelu", False, marks=pytest.mark.slow),
    ],
)
def test_an_operator_that_raises_ends_no_process(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: bool
) -> None:
    """Whenever it does: while samples are drawn, where it is compiled or judged, while it is made smaller."""
    operator, job = generated_operators.function_of(name), Job(0, 0, "aot_eager")
    monkeypatch.setattr(generated_compiled, "rows", lambda _: [(name, "float32")])
    monkeypatch.setitem(generated_compiled.SHRINKS, job.backend, 2)
    if wrong:
        monkeypatch.setattr(generated_compiled, "judge", lambda *_: (2.0, "planted"))
    errors = itertools.cycle([NotImplementedError("'planted_cpu' not implemented"), KeyError(), TypeError()])

    def run(calls: Iterator[int]) -> list[int]:
        error = next(errors)

        def raising(*args: object, **kwargs: object) -> object:
            if not torch.compiler.is_compiling() and next(calls, None) is None:
                raise error
            return operator(*args, **kwargs)

        monkeypatch.setattr(generated_operators.table()[name], "op", raising)
        said = generated_compiled.run(job)
        return [said["drawn"], said["judged"], *(len(said[key]) for key in ("failed", "refused", "unsure"))]

    counted = itertools.count()
    assert run(counted) == [1, 1, wrong, 0, 0]
    calls = next(counted)
    told = [run(iter(range(n))) for n in range(0, calls, max(1, calls // 9))]
    assert all(drawn == judged + refused + unsure for drawn, judged, _, refused, unsure in told)
    assert {one[0] for one in told} == {0, 1}
    assert wrong or any(one[3] or one[4] for one in told)
