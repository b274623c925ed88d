"""What one node does in a stage where nodes work together. In: a job and its plan. Out: its reports.

A pair of a links job starts when both nodes have ended the round before, or its time is over: a pair that
hangs must not make the next pair of its nodes look bad.
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stackcheck.engine.client import Mount
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import gate, link_stage, training
from stackcheck.fleet.gate import Gate
from stackcheck.fleet.link_stage import LinkPlan, NodeGroup, Report
from stackcheck.fleet.rendezvous import Rendezvous
from stackcheck.fleet.torchrun import EndedProgram, Torchrun
from stackcheck.fleet.training import TrainingPlan, TrainingReport
from stackcheck.suite import container_user

SLACK_S = 15
CHECKPOINTS = "/stackcheck/checkpoints"
TRAINERS = "/stackcheck/trainers"


@dataclass(frozen=True, kw_only=True)
class _Member:
    """One node of a group."""

    programs: Torchrun
    name: str
    attempt: Path
    report: Callable[[str], None]

    def _run(
        self,
        program: Sequence[str],
        group: LinkPlan | TrainingPlan,
        place: NodeGroup | TrainingPlan,
        folder: Path,
        *,
        ranks: int,
        mounts: tuple[Mount, ...] = (),
    ) -> EndedProgram:
        """Run a program with the others, once all are up, to its end."""
        begin = Gate(
            attempt=self.attempt,
            folder=folder,
            name=self.name,
            names=tuple(place.names),
            limit_s=group.start_s,
        )
        met = Rendezvous(
            nodes=len(place.names),
            rank=place.names.index(self.name),
            address=place.address,
            port=place.port,
            source="the plan",
        )
        return self.programs.run(
            met, ranks, tuple(program), limit_s=group.limit_s, mounts=mounts, on_start=begin.passed
        )


class LinkNode(_Member):
    """One node of a links job."""

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
        self.report(f"link: {' - '.join(group.names)}")
        program = ("workloads.fleet_link", str(plan.limit_s))
        folder = link_stage.folder_of(self.attempt, number)
        ended = self._run(program, plan, group, folder, ranks=self.programs.job.devices or 1)
        if ended.error or self.name != group.names[0]:
            return Report(error=ended.error)
        return link_stage.parse_line(ended.lines)


class TrainNode(_Member):
    """One node of a training job."""

    def play(self) -> None:
        """Train with the others to the end, or to the error that ends it."""
        plan = TrainingPlan.model_validate_json((self.programs.job.folder / training.PLAN).read_bytes())
        begun = training.words(training.checkpointed(plan))
        self.report(f"training: {' + '.join(plan.names)}, checkpoints: {begun}")
        told = self._train(plan)
        path = training.report_file(self.attempt, self.name)
        write_atomically(path, (told.model_dump_json().encode(),))

    def _train(self, plan: TrainingPlan) -> TrainingReport:
        program = ("workloads.training", json.dumps(plan.flags(CHECKPOINTS)), "--no-preflight")
        mounts = (
            Mount(source=self.programs.suite / "trainers", target=TRAINERS),
            Mount(source=_writable(Path(plan.checkpoints)), target=CHECKPOINTS, read_only=False),
        )
        folder = training.folder_of(self.attempt)
        ended = self._run(program, plan, plan, folder, ranks=plan.ranks, mounts=mounts)
        if ended.error or self.name != plan.names[0]:
            return TrainingReport(error=ended.error)
        return training.parse_lines(ended.lines)


def _writable(folder: Path) -> Path:
    """The shared folder of the checkpoints; the user of the container has to write there."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        user = container_user.uid()
        os.chown(folder, user, user)
    return folder
