"""What one node does in a links job. In: a job and its plan. Out: one report a round, in the job's folder.

A pair starts when both nodes have ended the round before, or its time is over: a pair that hangs must not
make the next pair of its nodes look bad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import gate, link_stage
from stackcheck.fleet.gate import Gate
from stackcheck.fleet.link_stage import LinkPlan, Report
from stackcheck.fleet.rendezvous import Rendezvous

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.fleet.link_stage import NodeGroup
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
        plan = LinkPlan.model_validate_json((self.programs.job.folder / link_stage.PLAN).read_bytes())
        for number, groups in enumerate(plan.rounds):
            group = next((group for group in groups if self.name in group.names), None)
            told = self._group(plan, number, group) if group else Report()
            path = link_stage.report_file(self.attempt, number, self.name)
            write_atomically(path, (told.model_dump_json().encode(),))
            self._wait_for_next(plan, number)

    def _wait_for_next(self, plan: LinkPlan, number: int) -> None:
        """Wait for those with whom this node works next: to wait for all, n nodes would read n files each."""
        following = plan.rounds[number + 1] if number + 1 < len(plan.rounds) else []
        names = {name for group in following if self.name in group.names for name in group.names}
        files = {name: link_stage.report_file(self.attempt, number, name) for name in names}
        gate.missing(self.attempt, files, plan.start_s + plan.limit_s + SLACK_S)

    def _group(self, plan: LinkPlan, number: int, group: NodeGroup) -> Report:
        """Work together with the others of a group."""
        rank, limit_s = group.names.index(self.name), plan.limit_s
        self.report(f"link: {' - '.join(group.names)}")
        place = Rendezvous(
            nodes=len(group.names), rank=rank, address=group.address, port=group.port, source="the plan"
        )
        begin = Gate(
            attempt=self.attempt,
            folder=link_stage.folder_of(self.attempt, number),
            name=self.name,
            names=tuple(group.names),
            limit_s=plan.start_s,
        )
        program = ("workloads.fleet_link", str(limit_s))
        ranks = self.programs.job.devices or 1
        ended = self.programs.run(place, ranks, program, limit_s=limit_s, on_start=begin.passed)
        if ended.error or rank:
            return Report(error=ended.error)
        return link_stage.parse_line(ended.lines)
