"""Steps of sequences that take a neighbour's rows or weights, or lose a part of theirs, are seen."""

import sys

import pytest

from planting import TESTS

pytest.importorskip("torch", reason="the suites need torch")
import torch

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated, generated_draws, generated_jagged
from workloads.generated_jagged import Case

LENGTHS, WIDTH = (17, 1, 64, 3), 32
STEPS, PRODUCT = generated_jagged.STEPS, generated_jagged.product


def share(*steps: str, end: str = "", dtype: str = "float32") -> float:
    """How far a case is from float64, as a share of what it may be."""
    call = generated_jagged.made(Case(dtype, 1, LENGTHS, WIDTH, steps, end))
    said = generated._judged(call, generated_draws.ATTENTION_NEEDED)
    assert said
    return said[0]


def among_all(name):
    """The step, of all sequences as if they were one."""

    healthy = STEPS[name]

    def step(x, learned):
        if not x.is_nested:
            return healthy(x, learned)
        whole = torch.nested.nested_tensor_from_jagged(x.values(), torch.tensor([0, sum(LENGTHS)]))
        return torch.nested.nested_tensor_from_jagged(healthy(whole, learned).values(), x.offsets())

    return step


def without_last(name):
    """The step with no gradient for the last row."""

    healthy = STEPS[name]

    def step(x, learned):
        out = healthy(x, learned)
        if x.is_nested:
            values = out.values()
            values.register_hook(lambda grad: grad.index_fill(0, torch.tensor([sum(LENGTHS) - 1]), 0))
            out = torch.nested.nested_tensor_from_jagged(values, x.offsets())
        return out

    return step


@pytest.mark.parametrize("name", ["attention", "beside its largest"])
def test_a_step_that_sees_other_sequences_is_found(name, monkeypatch):
    assert share(name) <= 1
    monkeypatch.setitem(STEPS, name, among_all(name))
    assert share(name) > 1


@pytest.mark.parametrize("name", ["linear", "layer_norm", "softmax"])
def test_a_lost_row_of_a_gradient_is_found(name, monkeypatch):
    assert share(name) <= 1
    monkeypatch.setitem(STEPS, name, without_last(name))
    assert share(name) > 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_that_gets_a_neighbours_weight_is_found(dtype, monkeypatch):
    assert share("experts", dtype=dtype) <= 1
    monkeypatch.setattr(
        generated_jagged,
        "product",
        lambda name, x, learned, offsets: PRODUCT(name, x, learned, (offsets - 1).clamp(min=0)),
    )
    assert share("experts", dtype=dtype) > 1


@pytest.mark.parametrize("name", ["csr", "bsr"])
def test_a_block_that_is_lost_is_found(name, monkeypatch):
    assert share(name) <= 1

    def loses(name, x, learned, offsets):
        weight = learned[0].clone()
        weight[-4:, -4:] = 0
        return PRODUCT(name, x, (weight, *learned[1:]), offsets)

    monkeypatch.setattr(generated_jagged, "product", loses)
    assert share(name) > 1


@pytest.mark.parametrize("what", sorted(generated_jagged.WRONG_GRADIENTS))
def test_what_is_passed_over_is_there(what, monkeypatch):
    """So this fails when torch hands backward the values' dimension."""
    case = {"end": what} if what in generated_jagged.ENDS else {}
    steps = (what,) if what in STEPS else ()
    assert share(*steps, **case) <= 1
    monkeypatch.setattr(generated_jagged, "WRONG_GRADIENTS", set())
    assert share(*steps, **case) > 1


@pytest.mark.parametrize(("steps", "judged"), [(("gelu",), True), (("beside its largest", "gelu"), False)])
def test_a_largest_number_that_roundings_choose_has_no_gradient_to_judge(steps, judged):
    """The tail of gelu is below any rounding, so many numbers of a sequence are the largest."""
    case = Case("float32", 1, (257, 129), WIDTH, steps, "its largest")
    assert generated_jagged.made(case).gradients == judged
