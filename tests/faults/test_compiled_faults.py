"""Programs for a compiler: what is drawn, who judges them, and that drawn faults of a compiler are found."""

import sys
from unittest import mock

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch

import compiled_power
import drawn_compiler_faults
from drawn_compiler_faults import Drawn

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated_compiled, generated_compiled_items, generated_judge
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
