"""How many drawn faults of a compiler generated programs find. In: faults, seeds. Out: what finds each.

A batch is a function of its seed and number. One run with faults that change nothing tells which batches a
fault strikes; with the fault planted only some of those run again.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from drawn_compiler_faults import Drawn, Planted
from generated_power import each

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from workloads import generated_compiled
from workloads.generated_compiled import TRACED, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

TRIES = 8  # batches of one seed that run with a fault planted


@dataclass
class Found:
    """What came of one fault: how many batches it strikes, and the first that fails by it."""

    struck: int = 0
    job: Job | None = None
    words: str = ""


def measure(
    faults: Sequence[Drawn], seeds: Sequence[int], batches: int, processes: int = 1
) -> dict[Drawn, Found]:
    """Look for each fault in one seed after the other, until it is found."""
    found = {fault: Found() for fault in faults}
    for seed in seeds:
        wanted = [fault for fault in faults if not found[fault].job]
        strikes: dict[Drawn, list[Job]] = {fault: [] for fault in wanted}
        jobs = [(wanted, Job(seed, number, TRACED)) for number in range(batches)]
        for job, struck in each(_struck, jobs, processes):
            for fault in struck:
                strikes[fault].append(job)
                found[fault].struck += 1
        tries = [(one, struck[:TRIES]) for one, struck in strikes.items() if struck]
        for fault, job, words in each(_first, tries, processes):
            found[fault].job, found[fault].words = job, words
    return found


def _struck(job: tuple[Sequence[Drawn], Job]) -> tuple[Job, set[Drawn]]:
    """The faults that strike a batch which is healthy without them."""
    with Planted(job[0], harmless=True).mode() as planted:
        report = generated_compiled.run(job[1])
    return job[1], planted.struck if not report["failed"] else set()


def _first(job: tuple[Drawn, Sequence[Job]]) -> tuple[Drawn, Job | None, str]:
    for one in job[1]:
        if failed := failures(job[0], one):
            return job[0], one, failed[0].splitlines()[0].strip()
    return job[0], None, ""


def failures(fault: Drawn, job: Job) -> list[str]:
    """What fails in a batch with a fault planted."""
    never = mock.patch.dict(generated_compiled.SHRINKS, {TRACED: 0})
    with never, Planted([fault]).mode():
        return list(generated_compiled.run(job)["failed"])
