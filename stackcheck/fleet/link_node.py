"""What one node does in a links job. In: a job and its plan. Out: one report a round, in the job's folder.

A round starts when every node has ended the one before, or its time is over: a pair that hangs must not
make the next pair of its nodes look bad.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import link_stage
from stackcheck.fleet.link_stage import Plan, Report
from stackcheck.fleet.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.fleet.link_stage import Group
    from stackcheck.fleet.torchrun import Torchrun

SLACK_S = 15


@dataclass(frozen=True, kw_only=True)
class LinkNode:
    """One node of a links job."""

    programs: Torchrun
    name: str
    attempt: Path
    report: Callable[[str], None]

    def play(self) -> None:
        """Every round in order."""
        plan = Plan.model_validate_json((self.programs.job.folder / link_stage.PLAN).read_bytes())
        for number, groups in enumerate(plan.rounds):
            group = next((group for group in groups if self.name in group.names), None)
            told = self._group(group, plan.limit_s) if group else Report()
            path = link_stage.report_file(self.attempt, number, self.name)
            write_atomically(path, (told.model_dump_json().encode(),))
            self._wait_for_all(plan, number)

    def _wait_for_all(self, plan: Plan, number: int) -> None:
        names = {name for groups in plan.rounds for group in groups for name in group.names}
        end = time.monotonic() + plan.limit_s + SLACK_S
        while time.monotonic() < end:
            if all(link_stage.report_file(self.attempt, number, name).exists() for name in names):
                return
            time.sleep(0.2)

    def _group(self, group: Group, limit_s: int) -> Report:
        """Work together with the others of a group."""
        rank = group.names.index(self.name)
        self.report(f"link: {' - '.join(group.names)}")
        place = Rendezvous(
            nodes=len(group.names), rank=rank, address=group.address, port=group.port, source="the plan"
        )
        program = ("workloads.fleet_link", str(limit_s))
        ended = self.programs.run(place, self.programs.job.devices or 1, program, limit_s=limit_s)
        if ended.error or rank:
            return Report(error=ended.error)
        return link_stage.parse_line(ended.lines)
