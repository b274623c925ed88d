"""A child that answers a witness question with anything but the values of these numbers is found."""

import random

import pytest

from harness import witness
from planting import Fault

SAYS = "tolerances from what the controller computed"
KERNELS = "workloads.witness:"
FAULTS = (
    Fault(
        "a product that is a thousandth too large",
        "test_witness.py::test_witness[gemm]",
        patches={
            KERNELS
            + "gemm": "lambda **k: {n: [[x * 1.001 for x in r] for r in v] for n, v in original(**k).items()}"
        },
        says=SAYS,
    ),
    Fault(
        "attention that ignores its mask",
        "test_witness.py::test_witness[attention]",
        patches={KERNELS + "attention": "lambda causal, **k: original(causal=not causal, **k)"},
        says=SAYS,
    ),
    Fault(
        "a norm with a loose epsilon",
        "test_witness.py::test_witness[layer_norm]",
        patches={KERNELS + "layer_norm": "lambda eps, **k: original(eps=eps * 10_000, **k)"},
        says=SAYS,
    ),
    Fault(
        "a loss of other targets",
        "test_witness.py::test_witness[cross_entropy]",
        patches={
            KERNELS
            + "cross_entropy": "lambda targets, **k: original(targets=[(t + 1) % 11 for t in targets], **k)"
        },
        says=SAYS,
    ),
    Fault(
        "a convolution without the last filter",
        "test_witness.py::test_witness[convolution]",
        patches={
            KERNELS + "convolution": "lambda kernel, **k: original(kernel=kernel[:-1] + "
            "[[[[0.0 for _ in row] for row in window] for window in kernel[-1]]], **k)"
        },
        says=SAYS,
    ),
    Fault(
        "an embedding that loses repeated rows",
        "test_witness.py::test_witness[embedding]",
        patches={
            KERNELS + "embedding": "lambda rows, weights, **k: original(rows=rows, weights="
            "[[0.0 for _ in w] if r in rows[:n] else w for n, (r, w) in enumerate(zip(rows, weights))], **k)"
        },
        says=SAYS,
    ),
    Fault(
        "an optimizer without its last step",
        "test_witness.py::test_witness[optimizer]",
        patches={KERNELS + "optimizer": "lambda gradients, **k: original(gradients=gradients[:-1], **k)"},
        says=SAYS,
    ),
    Fault(
        "an optimizer with another second beta",
        "test_witness.py::test_witness[optimizer]",
        patches={KERNELS + "optimizer": "lambda betas, **k: original(betas=(betas[0], 0.999), **k)"},
        says=SAYS,
    ),
    Fault(
        "training that repeats what it said before",
        "test_witness.py::test_witness[training]",
        patches={KERNELS + "training": "lambda **k: {n: [1.0] * len(v) for n, v in original(**k).items()}"},
        says=SAYS,
    ),
    Fault(
        "ranks that say what an earlier run said",
        "test_witness.py::test_witness_of_collectives",
        patches={"harness.launch:launch": "lambda *a, **k: {**original(*a, **k), 'total': [0.0]}"},
        says=SAYS,
    ),
    Fault(
        "a user's program that gets other libraries than the suites",
        "test_witness.py::test_witness_by_the_way_of_a_user",
        patches={"harness.launch:as_a_user": "lambda *a, **k: {'product': [], 'a': [], 'b': []}"},
        says=SAYS,
    ),
)


@pytest.mark.parametrize(("key", "source"), [pair for fault in FAULTS for pair in fault.patches.items()])
def test_a_fault_changes_the_answer_of_every_question_that_can_be_drawn(key: str, source: str) -> None:
    """Else a run that draws the one where it changes nothing would miss it."""
    question = witness.FAMILIES.get(key.removeprefix(KERNELS))
    for seed in range(200 if question else 0):
        asked = question.draw(random.Random(seed))
        right = question.answer(**asked)
        given = eval(source, {"original": question.answer})(**asked)
        assert witness.worst(right, given) > 1, f"{key}: seed {seed}"


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault: Fault, plant) -> None:
    plant(fault)
