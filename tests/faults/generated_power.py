"""How many drawn faults generated cases find. In: faults, seeds, counts. Out: the case that finds each.

A case is a function of its family, seed and number. So one run without faults tells which cases run a fault's
operator in its type while its condition holds; with the fault planted only those cases run again.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

import drawn_faults
from drawn_faults import Drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from workloads import generated, generated_judge, generated_operators

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from multiprocessing.pool import Pool

AT_ONCE = 32  # cases that a process takes
TRIES = 40  # cases of one seed that run with a fault planted
Case = tuple[str, int, int]  # family, seed, number


@dataclass
class Found:
    """What came of one fault: how many cases run it, and the first that fails by it."""

    touched: int = 0
    case: Case | None = None


@dataclass
class Power:
    """By fault; and which operators ran at all, in which type."""

    faults: dict[Drawn, Found]
    ran: set[tuple[str, torch.dtype]] = field(default_factory=set)

    def within(self, seeds: Sequence[int]) -> int:
        """How many faults are found by these seeds."""
        return sum(one.case is not None and one.case[1] in seeds for one in self.faults.values())


def measure(
    faults: Sequence[Drawn], seeds: Sequence[int], counts: Mapping[str, int], processes: int = 1
) -> Power:
    """Look for each fault in one seed after the other, until it is found."""
    power = Power({fault: Found() for fault in faults})
    generated_operators.rows()
    with multiprocessing.get_context("fork").Pool(processes, torch.set_num_threads, (1,)) as pool:
        for seed in seeds:
            wanted = [fault for fault, found in power.faults.items() if not found.case]
            cases = [(family, seed, n) for family, count in counts.items() for n in range(count)]
            runs: dict[Drawn, list[Case]] = {fault: [] for fault in wanted}
            _look_for(pool, cases, wanted, runs, power)
            jobs = [(fault, runs[fault][:TRIES]) for fault in wanted if runs[fault]]
            for fault, case in pool.imap_unordered(_first, jobs, chunksize=1):
                power.faults[fault].case = case
            for fault in wanted:
                power.faults[fault].touched += len(runs[fault])
    return power


def _look_for(
    pool: Pool, cases: Sequence[Case], wanted: Sequence[Drawn], runs: dict[Drawn, list[Case]], power: Power
) -> None:
    """Note for each fault the cases that could show it."""
    parts = [(cases[n : n + AT_ONCE], wanted) for n in range(0, len(cases), AT_ONCE)]
    for ran, struck in pool.imap(_touched, parts):
        power.ran |= ran
        for fault, case in struck:
            runs[fault].append(case)


def _touched(
    job: tuple[Sequence[Case], Sequence[Drawn]],
) -> tuple[set[tuple[str, torch.dtype]], list[tuple[Drawn, Case]]]:
    ran, struck = set(), []
    for case in job[0]:
        drawn = touched(case, job[1])
        ran |= drawn.ran
        struck += [(fault, case) for fault in drawn.struck]
    return ran, struck


def touched(case: Case, faults: Sequence[Drawn]) -> drawn_faults.Watched:
    """The faults that could strike in this case."""
    drawn = None
    with generated._plain(), contextlib.suppress(Exception):
        drawn = generated._drawn(*case, "small")
    with generated._plain(), drawn_faults.Watched(faults) as watched:
        for _, call in drawn[1] if drawn else ():
            with contextlib.suppress(Exception):
                generated_judge.results(call)
    return watched


def _first(job: tuple[Drawn, list[Case]]) -> tuple[Drawn, Case | None]:
    return job[0], found(*job)


def found(fault: Drawn | None, cases: Sequence[Case]) -> Case | None:
    """The first case that fails with the fault planted."""
    for case in cases:
        with generated._plain():
            if fault is None:
                margin = generated.margin(*case)
            else:
                with fault.mode():
                    margin = generated.margin(*case)
        if margin is not None and margin > 1:
            return case
    return None
