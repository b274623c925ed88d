"""Drawn work that is slow beside larger work is named, for conditions that no check knows; equal passes.

The grammar is the real one, and the clock a model of a device: on a processor no real one says anything
about a GPU.
"""

import random
import sys
from collections.abc import Callable, Iterator

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import generated_speed
from workloads.generated_speed import KINDS, Work

CHECK = "test_kernel_speed.py::test_generated_speed"
PEAK, BANDWIDTH = {"fp32": 5e13}, 3e12
PIECES, NIGHTS, FAULTS = 40, 7, 60
LEAST_FOUND = {1: 30, NIGHTS: 42}  # by one run, and by seven nights
Condition = Callable[[Work], bool]


def healthy(work: Work) -> float:
    """Seconds of a device that does all at its peaks, to a fifth; the same for the same work."""
    operations, moved = KINDS[work.kind].amount(work)
    moved *= 1 if work.dtype == "fp32" else 0.5
    noise = random.Random(str(work)).uniform(1.0, 1.2)
    return noise * max(operations / PEAK.get(work.dtype, 8e14), moved / BANDWIDTH) + 3e-6


def drawn(number: int) -> tuple[str, Condition]:
    """A condition that most of the work of one kind does not meet."""
    r = random.Random(f"a slow kernel {number}")
    like = generated_speed.draw(r.randrange(10**6), r.randrange(PIECES))
    name, size = r.choice([one for one in like.sizes if one[0] != "dims"])
    step = r.choice([step for step in (2, 8, 64) if size % step] or [0])
    conditions: list[tuple[str, Condition]] = [
        (f"{like.dtype} {like.way[0]}", lambda w: w.dtype == like.dtype and w.way[0] == like.way[0]),
        (f"{like.dtype} {like.way[-1]}", lambda w: w.dtype == like.dtype and w.way[-1] == like.way[-1]),
        (f"{like.way[0]}, small {name}", lambda w: w.way[0] == like.way[0] and w.of(name) <= size),
    ]
    if step:
        conditions.append((f"{name} not a multiple of {step}", lambda w: bool(w.of(name) % step)))
    words, condition = r.choice(conditions)
    return f"{like.kind} {words}", lambda w: w.kind == like.kind and condition(w)


@pytest.fixture(autouse=True)
def sizes_of_a_gpu(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(generated_speed.MOST, "cpu", generated_speed.MOST["cuda"])
    return


@pytest.mark.healthy
@pytest.mark.parametrize("seed", range(3))
def test_a_device_that_is_as_fast_as_it_can_be_passes(monkeypatch, seed):
    monkeypatch.setattr(generated_speed, "seconds", healthy)
    found = generated_speed.check(seed, PIECES, PIECES, 0)
    assert not found["slow"]
    assert not found["refused"]
    assert {one["kind"] for one in found["figures"]} == set(KINDS)


@pytest.mark.parametrize("nights", LEAST_FOUND)
def test_most_kernels_that_are_ten_times_slower_are_seen(monkeypatch, nights):
    seen = []
    for number in range(FAULTS):
        words, condition = drawn(number)
        monkeypatch.setattr(
            generated_speed, "seconds", lambda w, c=condition: healthy(w) * (10 if c(w) else 1) + 2e-5 * c(w)
        )
        if any(generated_speed.check(seed, PIECES, PIECES, 0)["slow"] for seed in range(nights)):
            seen.append(words)
    assert len(seen) >= LEAST_FOUND[nights], f"{len(seen)} of {FAULTS} are seen: {seen}"


def planted(name: str, seconds: str, *, passes: bool = False) -> Fault:
    """The check on a made-up GPU with a clock of its own."""
    return Fault(
        name,
        CHECK,
        "passed" if passes else "failed",
        "" if passes else "times the",
        vendor="nvidia",
        nvml={"devices": 1},
        patches={"workloads.generated_speed:seconds": seconds},
        tier="soak",
    )


SLOW = planted(
    "bfloat16 of one layout at a tenth", "lambda w: 1e-2 if 'NT' in w.way and w.dtype == 'bf16' else 1e-3"
)
HEALTHY = planted("nothing", "lambda w: 1e-3", passes=True)


@pytest.mark.parametrize("fault", [SLOW, HEALTHY], ids=str)
def test_the_check_names_slow_work(fault, plant):
    plant(fault)
