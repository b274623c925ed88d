"""A collective that hangs ends within seconds and names the rank; a library that waits forever fails."""

import time

import pytest

import planting

SLEEPS = (
    "lambda t, *a, **k: (__import__('time').sleep(300) if get_rank() == 1 else None, original(t, *a, **k))[1]"
)
FAULTS = (
    planting.Fault(
        "rank 1 never enters the sum",
        "test_collectives.py::test_all_reduce_values",
        says="but not on ranks [1]",
        tier="smoke",
        patches={
            "workloads.ranks:joined": "lambda timeout_s=0: original(timeout_s=12)",
            "torch.distributed:all_reduce": SLEEPS,
        },
    ),
    planting.Fault(
        "an operation is refused by every rank",
        "test_collectives.py::test_scatter_values",
        says="raised RuntimeError: no scatter here",
        tier="smoke",
        patches={
            "torch.distributed:scatter": "lambda *a, **k: exec('raise RuntimeError(\\'no scatter here\\')')"
        },
    ),
    planting.Fault(
        "the library ignores its timeout",
        "test_collectives.py::test_absent_rank_is_named",
        says="s for rank 1 without an error",
        patches={
            "torch.distributed:new_group": "lambda *a, timeout=None, **k: original(*a, **k)",
            "harness.launch:launch": "lambda program, words, **k: original(program, [words[0], '4.0'], **k)",
        },
    ),
)


@pytest.mark.waits
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_hang_fails_the_suite_in_time(fault: planting.Fault, plant) -> None:
    start = time.monotonic()
    plant(fault)
    assert time.monotonic() - start < 240, "a hang was waited for"
