"""How many drawn faults generated cases find. In: faults, seeds, counts. Out: the case that finds each.

A case is a function of its family, seed and number. So one run without faults tells which cases run a fault's
operator in its type while its condition holds; with the fault planted only those cases run again.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import drawn_faults
from drawn_faults import Drawn

sys.path.insert(0, str(Path(__file__).parents[1] / "acceptance"))

from workloads import generated, generated_draws, generated_judge, generated_operators, generated_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

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
    for seed in seeds:
        wanted = [fault for fault, found in power.faults.items() if not found.case]
        cases = [(family, seed, n) for family, count in counts.items() for n in range(count)]
        runs: dict[Drawn, list[Case]] = {fault: [] for fault in wanted}
        for ran, struck in each(_touched, [(part, wanted) for part in batched(cases)], processes):
            power.ran |= ran
            for fault, case in struck:
                runs[fault].append(case)
        jobs = [(fault, runs[fault][:TRIES]) for fault in wanted if runs[fault]]
        for fault, case in each(_first, jobs, processes):
            power.faults[fault].case = case
        for fault in wanted:
            power.faults[fault].touched += len(runs[fault])
    return power


def batched(cases: Sequence[Case]) -> list[Sequence[Case]]:
    """The cases, as many together as one process takes."""
    return [cases[n : n + AT_ONCE] for n in range(0, len(cases), AT_ONCE)]


def each(function: Callable[[Any], Any], jobs: Sequence[Any], processes: int) -> Iterator[Any]:
    """What a function gives for each job, in processes; nothing for a job that ends its process."""
    for _, answer in generated_processes.each(function, jobs, processes):
        if not isinstance(answer, generated_processes.Ended):
            yield answer


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
    with generated._plain(), generated_processes.limited(), contextlib.suppress(Exception):
        drawn = generated_draws.drawn(*case, "small")
    with generated._plain(), generated_processes.limited(), drawn_faults.Watched(faults) as watched:
        for _, call in drawn[1] if drawn else ():
            with contextlib.suppress(Exception):
                if generated.is_sent(call):
                    generated_judge.results(call)
    return watched


def _first(job: tuple[Drawn, list[Case]]) -> tuple[Drawn, Case | None]:
    return job[0], found(*job)


def found(fault: Drawn, cases: Sequence[Case]) -> Case | None:
    """The first case that fails with the fault planted, and passes without it."""
    return next((case for case in cases if fails(fault, case) and not fails(None, case)), None)


def fails(fault: Drawn | None, case: Case) -> bool:
    """Whether a case fails with a fault planted, or without any."""
    with (
        generated._plain(),
        generated_processes.limited(),
        fault.mode() if fault else contextlib.nullcontext(),
    ):
        margin = generated.margin(*case)
    return margin is not None and margin > 1
