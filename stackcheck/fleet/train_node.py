"""What one node does in a training job. In: a job and its plan. Out: its report, in the job's folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.engine.client import Mount
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import training
from stackcheck.fleet.gate import Gate
from stackcheck.fleet.rendezvous import Rendezvous
from stackcheck.fleet.training import TrainingPlan, TrainingReport
from stackcheck.suite import container_user

if TYPE_CHECKING:
    from collections.abc import Callable

    from stackcheck.fleet.torchrun import Torchrun

CHECKPOINTS = "/stackcheck/checkpoints"
TRAINERS = "/stackcheck/trainers"


@dataclass(frozen=True, kw_only=True)
class TrainNode:
    """One node of a training job."""

    programs: Torchrun
    name: str
    attempt: Path
    report: Callable[[str], None]

    def play(self) -> None:
        """Train with the others to the end, or to the error that ends it."""
        plan = TrainingPlan.model_validate_json((self.programs.job.folder / training.PLAN).read_bytes())
        begun = training.words(training.checkpointed(plan))
        self.report(f"training: {' + '.join(plan.names)}, checkpoints: {begun}")
        told = self._train(plan)
        path = training.report_file(self.attempt, self.name)
        write_atomically(path, (told.model_dump_json().encode(),))

    def _train(self, plan: TrainingPlan) -> TrainingReport:
        rank = plan.names.index(self.name)
        begin = Gate(
            attempt=self.attempt,
            folder=training.folder_of(self.attempt),
            name=self.name,
            names=tuple(plan.names),
            limit_s=plan.start_s,
        )
        place = Rendezvous(
            nodes=len(plan.names), rank=rank, address=plan.address, port=plan.port, source="the plan"
        )
        program = ("workloads.training", json.dumps(plan.flags(CHECKPOINTS)), "--no-preflight")
        mounts = (
            Mount(source=self.programs.suite / "trainers", target=TRAINERS),
            Mount(source=_writable(Path(plan.checkpoints)), target=CHECKPOINTS, read_only=False),
        )
        ended = self.programs.run(
            place, plan.ranks, program, limit_s=plan.limit_s, mounts=mounts, on_start=begin.passed
        )
        if ended.error or rank:
            return TrainingReport(error=ended.error)
        return training.parse_lines(ended.lines)


def _writable(folder: Path) -> Path:
    """The shared folder of the checkpoints; the user of the container has to write there."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.geteuid() == 0:
        user = container_user.uid()
        os.chown(folder, user, user)
    return folder
