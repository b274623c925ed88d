"""A child that answers a witness question with anything but the values of these numbers is found."""

# ruff: noqa: E501 - a table of faults reads in rows
import random

import pytest

from harness import witness
from planting import Fault

SAYS = "tolerances from what the controller computed"
KERNELS = "workloads.witness:"
# What is wrong -> the check that finds it, what is replaced, and by what.
ROWS = {
    "a product that is a thousandth too large": (
        *("test_witness[gemm]", KERNELS + "gemm"),
        "lambda **k: {n: [[x * 1.001 for x in r] for r in v] for n, v in original(**k).items()}",
    ),
    "attention that ignores its mask": (*("test_witness[attention]", KERNELS + "attention"), "lambda causal, **k: original(causal=not causal, **k)"),
    "a norm with a loose epsilon": (*("test_witness[layer_norm]", KERNELS + "layer_norm"), "lambda eps, **k: original(eps=eps * 10_000, **k)"),
    "a loss of other targets": (
        *("test_witness[cross_entropy]", KERNELS + "cross_entropy"),
        "lambda targets, **k: original(targets=[(t + 1) % 11 for t in targets], **k)",
    ),
    "a convolution without the last filter": (
        *("test_witness[convolution]", KERNELS + "convolution"),
        (
            "lambda kernel, **k: original(kernel=kernel[:-1] + "
            "[[[[0.0 for _ in row] for row in window] for window in kernel[-1]]], **k)"
        ),
    ),
    "an embedding that loses repeated rows": (
        *("test_witness[embedding]", KERNELS + "embedding"),
        (
            "lambda rows, weights, **k: original(rows=rows, weights="
            "[[0.0 for _ in w] if r in rows[:n] else w for n, (r, w) in enumerate(zip(rows, weights))], **k)"
        ),
    ),
    "an optimizer without its last step": (*("test_witness[optimizer]", KERNELS + "optimizer"), "lambda gradients, **k: original(gradients=gradients[:-1], **k)"),
    "an optimizer with another second beta": (*("test_witness[optimizer]", KERNELS + "optimizer"), "lambda betas, **k: original(betas=(betas[0], 0.999), **k)"),
    "training that repeats what it said before": (*("test_witness[training]", KERNELS + "training"), "lambda **k: {n: [1.0] * len(v) for n, v in original(**k).items()}"),
    "ranks that say what an earlier run said": (*("test_witness_of_collectives", "harness.launch:launch"), "lambda *a, **k: {**original(*a, **k), 'total': [0.0]}"),
    "a user's program that gets other libraries than the suites": (
        *("test_witness_by_the_way_of_a_user", "harness.launch:as_a_user"),
        "lambda *a, **k: {name: {} for name in original(*a, **k)}",
    ),
}  # fmt: skip
SPEED = "test_witness.py::test_witness_of_speed"
CHAIN = "workloads.chain:run"
# What a child does to seem fast -> what is replaced, by what, and the reason that the run gives.
CLOCKS = {
    "a child that says a third of its time": (CHAIN, "lambda **k: {**(said := original(**k)), 'seconds': said['seconds'] / 3}", "by the controller's clock"),
    "a clock of the image that runs slowly": ("workloads.chain:time.perf_counter", "lambda: original() / 10", "by the controller's clock"),
    "a child that says more than it took": (CHAIN, "lambda **k: {**(said := original(**k)), 'seconds': said['seconds'] * 3}", "by the controller's clock"),
    "a child that leaves steps out": (CHAIN, "lambda steps, **k: original(steps=steps - 1, **k)", "the controller computed"),
    "a child that computes an eighth of the rows": (CHAIN, "lambda **k: {**(said := original(**k)), 'sums': said['sums'][:64] + [0] * 448}", "the controller computed"),
    "a child that computed everything before it was asked": (CHAIN, "lambda salt, **k: original(salt='', **k)", "the controller computed"),
    "a wrapper that computes half of the rows of a large product": (
        "torch:mm",
        (
            "lambda a, b, out: (original(a[:len(a) // 2], b, out=out[:len(a) // 2]), "
            "out[len(a) // 2:].copy_(out[:len(a) // 2]))"
        ),
        "the controller computed",
    ),
    "a child that answers with another form": (CHAIN, "lambda **k: {'seconds': 'x'}", "for each row"),
}  # fmt: skip
# What disagrees with the clock is asked again, for twice as long each time: one more is enough here.
AGAIN = {"harness.clock:TRIES": "2"}
ALIKE = (
    "a child that says a third of its time",
    "a child that says more than it took",
    "a child that computed everything before it was asked",
    "a child that answers with another form",
)
FAULTS = (
    [
        Fault(name, f"test_witness.py::{check}", patches={place: source}, says=SAYS)
        for name, (check, place, source) in ROWS.items()
    ]
    + [
        Fault(
            "a torchrun that starts no ranks",
            "test_witness.py::test_witness_of_collectives",
            patches={
                "torch.distributed.launcher.api:launch_agent": "lambda *a, **k: exec('raise OSError(\\'no agent\\')')"
            },
            says="no agent",
        )
    ]
    + [
        Fault(name, SPEED, patches={place: source, **AGAIN}, says=says, tier="smoke", another=name in ALIKE)
        for name, (place, source, says) in CLOCKS.items()
    ]
)
# Honest where the suites are loaded, and in the program of a user that has a word of theirs.
WORDS = "('weights', 'witness', '_told')"
KNOWS = f"'harness' in (s := __import__('sys')).modules or [w for w in {WORDS} if w in str(s.orig_argv)]"
KNOWING = [
    Fault(
        f"a torch that computes {place.split('.')[-1]} only where it knows the suites or their words",
        "test_witness.py::test_witness_by_the_way_of_a_user",
        patches={place: f"lambda *a, **k: (original(*a, **k) if {KNOWS} else original(*a, **k) * 0)"},
        says=SAYS,
        another=place != "torch:Tensor.__matmul__",
    )
    for place in ("torch:Tensor.__matmul__", "torch.nn.functional:layer_norm", "torch.nn.functional:conv2d")
]


@pytest.mark.parametrize(
    ("key", "source"), [row[1:] for row in ROWS.values() if row[1].startswith(KERNELS)], ids=str
)
def test_a_fault_changes_the_answer_of_every_question_that_can_be_drawn(key, source):
    """Else a run that draws the one where it changes nothing would miss it."""
    question = witness.FAMILIES[key.removeprefix(KERNELS)]
    for seed in range(50):
        asked = question.draw(random.Random(seed))
        right = question.answer(**asked)
        given = eval(source, {"original": question.answer})(**asked)
        assert witness.worst(right, given) > 1, f"{key}: seed {seed}"


# Each takes a Python of its own: the slow tests plant the same lie in the other places.
@pytest.mark.parametrize("fault", [*FAULTS, *KNOWING], ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow  # as a run of the suites in the image does
def test_an_honest_child_passes(plant):
    plant(Fault("nothing", SPEED, outcome="passed", tier="smoke"))
