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


# The suites' clock ends these, and the record says so: where the limits are a guess, such a run is UNFIT.
BY_THE_CLOCK = (
    planting.Fault(
        "a kernel never ends",
        "test_kernels.py::test_embedding[bf16]",
        says="did not answer in 5 s",
        patches={
            "workloads.embedding:check": "lambda **k: __import__('time').sleep(300)",
            "harness.session:AcceptanceSession.limit_s": "lambda self, timeout_s, ranks=1: 5.0",
        },
    ),
    planting.Fault(
        "a rank never ends its world",
        "test_collectives.py::test_groups_set_up_and_torn_down",
        says="was not set up and torn down in time",
        another=True,
        patches={
            "workloads.collective_groups:cycle": "lambda r, key, **k: (__import__('time').sleep(100)"
            " if r.rank == 1 and key.endswith('/3') else 0, original(r, key, **k))[1]",
            "workloads.collective_groups:LIMIT_S": "10.0",
        },
    ),
    planting.Fault(
        "a phase of a job lasts too long",
        "test_training.py::test_loss_falls",
        says="lasted more than 8 s",
        another=True,
        patches={
            "train:train": "lambda run: __import__('time').sleep(600)",
            "phases:Phases.__init__": "lambda self, limit_s: original(self, 8.0)",
        },
    ),
)


@pytest.mark.waits
@pytest.mark.parametrize("fault", BY_THE_CLOCK, ids=str)
def test_what_the_clock_ended_says_so(fault, plant):
    assert {check["cause"] for check in plant(fault)["checks"]} == {"time_limit"}


@pytest.mark.waits
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_hang_fails_the_suite_in_time(fault, plant):
    start = time.monotonic()
    plant(fault)
    assert time.monotonic() - start < 240, "a hang was waited for"
