"""Programs for a compiler: what is drawn, who judges them, and that drawn faults of a compiler are found."""

import functools
import random
import sys
from collections.abc import Callable
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
    generated_judge,
    generated_operators,
    generated_random,
)
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


def test_what_is_summed_alone_is_drawn() -> None:
    """Its gradient is one number for all, which a compiler keeps with stride 0; it has other operands too."""
    found = [generated_compiled_items.draw(random.Random(n), "slice_scatter", "float32") for n in range(40)]
    programs = [generated_compiled_items.program_of(one.call) for one in found if one]
    alone = {one.partner for one in programs if one.hidden}
    kinds = {type(generated_operators.table()[one]).__name__ for one in alone}
    assert "ReductionOpInfo" in kinds
    assert len(kinds) > 1
    assert any(not one.is_contiguous() for each in found if each for one in each.call.tensors()[1:])


def test_what_draws_numbers_is_drawn_without_a_seed_of_its_own() -> None:
    """The table's own functions put the generator back."""
    for name in ("nn.functional.dropout", "bernoulli", "rand_like", "uniform", "nn.functional.rrelu"):
        found = [generated_compiled_items.draw(random.Random(n), name, "float32") for n in range(6)]
        assert any(one.draws for one in found if one)
    assert not any(generated_operators.rows().count((one, "float32")) for one in ("rand_like", "uniform"))


class Again(torch.autograd.Function):
    """Dropout whose backward draws again."""

    @staticmethod
    def forward(_context: object, x: torch.Tensor) -> torch.Tensor:
        """Some of the numbers."""
        return x * (torch.rand_like(x) < 0.75)

    @staticmethod
    def backward(_context: object, gradient: torch.Tensor) -> torch.Tensor:
        """The fault."""
        return gradient * (torch.rand_like(gradient) < 0.75)


def _by_mask(x: torch.Tensor, share: float, alike: int = 1) -> torch.Tensor:
    mask = torch.rand(x.numel() // alike, device=x.device) < share
    return x * mask.repeat_interleave(alike).view(x.shape) / 0.75


def _from_one_seed(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.manual_seed(5)
    return _by_mask(x, 0.75)


def _from_any_seed(x: torch.Tensor) -> torch.Tensor:
    torch.default_generator.seed()
    return _by_mask(x, 0.75)


DRAWN: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "nothing": (functools.partial(_by_mask, share=0.75), ""),
    "backward draws again": (Again.apply, "its gradient is not that of the numbers"),
    "groups of four are alike": (functools.partial(_by_mask, share=0.75, alike=4), "distributed otherwise"),
    "it keeps more": (functools.partial(_by_mask, share=0.8), "distributed otherwise"),
    "each run has the same": (_from_one_seed, "again and again"),
    "no run has the same": (_from_any_seed, "the same seed gives other numbers"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", DRAWN)
def test_numbers_that_a_compiler_draws_wrong_are_seen(what: str, dtype: torch.dtype) -> None:
    """Beside dropout in eager mode, which has no fault."""
    faulty, words = DRAWN[what]
    call = call_of("nn.functional.dropout", torch.linspace(0.5, 2, 4096).view(64, 64).to(dtype))
    call = Call(**{**vars(call), "args": (call.args[0], ((), {"p": 0.25}), ((), {})), "dtype": dtype})
    item = Item("nn.functional.dropout", call, draws=True)
    said = generated_random.judge(item, lambda x, *_: (faulty(x),))
    assert said
    assert (said[0] > 1) is bool(words)
    assert words in said[1]


@pytest.mark.parametrize("what", ["a generator that is not put back", "rrelu"])
def test_other_numbers_under_recomputation_are_seen(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As is torch's own fault in rrelu, if this torch has it: so it is drawn without recomputation."""
    name = "nn.functional.rrelu" if what == "rrelu" else "nn.functional.dropout"
    words = {"lower": 0.25, "upper": 0.75, "training": True} if what == "rrelu" else {"p": 0.5}
    call = call_of(name, -torch.linspace(0.5, 2, 4096))
    program = generated_compiled_items.program_of(call)
    call = Call(**{**vars(call), "args": (call.args[0], ((), words), ((), {}))})
    for recomputed in (False, True):
        again = Program(name, program.operator, program.shape, recomputed=recomputed)
        item = Item(name, Call(**{**vars(call), "function": again}), draws=True)
        assert (generated_random.judge(item, again.compiled) or (0, ""))[0] <= 1 or (
            what == "rrelu" and recomputed
        )
        forgetful = functools.partial(checkpoint, preserve_rng_state=False)
        monkeypatch.setattr(generated_compiled_items, "checkpoint", forgetful)
        said = generated_random.judge(item, again.compiled)
        monkeypatch.undo()
        assert said
        assert (said[0] > 1) is recomputed


def test_a_share_that_dropout_keeps_is_held_to_what_was_asked() -> None:
    call = call_of("nn.functional.dropout", torch.ones(3))
    call = Call(**{**vars(call), "args": (call.args[0], ((), {"p": 0.25}), ((), {}))})
    assert generated_random.kept(functional.dropout, 2, call, 0.25) <= 1
    assert generated_random.kept(functional.dropout, 2, call, 0.4) > 1
