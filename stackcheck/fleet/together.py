"""What one node does in a stage where nodes work together. In: a job and its plan. Out: its reports.

A pair of a links job starts when both nodes have ended the round before, or its time is over: a pair that
hangs must not make the next pair of its nodes look bad.

The container has the host's network, and with GPUs the InfiniBand devices and pinned memory; nothing else of
a fleet has them. The site chooses the network interface: its variables are passed on.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stackcheck import vendors
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.engine.devices import with_devices
from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import gate, link_stage, training
from stackcheck.fleet.gate import Gate, NotUpError
from stackcheck.fleet.job import Job
from stackcheck.fleet.link_stage import LinkPlan, NodeGroup, Report
from stackcheck.fleet.rendezvous import Rendezvous
from stackcheck.fleet.training import TrainingPlan, TrainingReport
from stackcheck.suite import inputs, interpreter, run, steering
from stackcheck.suite.subject import Subject

TAIL = 20  # lines of a program that are kept
TESTS = "/stackcheck/tests"
INFINIBAND = Path("/dev/infiniband")
SITE = ("GLOO_", "TP_")  # which interface gloo uses; vendors.site_environment has NCCL's


@dataclass(frozen=True, kw_only=True)
class EndedProgram:
    """How a program ended on this node: its last lines, and the error; None if the exit code is 0."""

    lines: list[str]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Torchrun:
    """How programs are started on this node."""

    job: Job
    subject: Subject
    engine: Engine
    suite: Path  # the frozen copy of suites and trainers

    def run(
        self,
        place: Rendezvous,
        ranks: int,
        program: tuple[str, ...],
        *,
        limit_s: int,
        mounts: tuple[Mount, ...] = (),
        on_start: Callable[[], None] | None = None,
    ) -> EndedProgram:
        """Run a module of the suites to its end, under torchrun's agent, with `ranks` ranks on this node."""
        lines: deque[str] = deque(maxlen=TAIL)
        spec = self._container(place, ranks, program, limit_s, mounts)
        try:
            code = self.engine.run(replace(spec, on_start=on_start, on_line=lines.append))
        except NotUpError as error:
            return EndedProgram(lines=[*lines], error=error.what)
        except ChecksFailedError:
            return EndedProgram(lines=[*lines], error=f"did not end within {limit_s} s")
        return EndedProgram(
            lines=[*lines], error=(f"exit code {code}: " + " | ".join([*lines][-3:])[-400:]) if code else None
        )

    def _container(
        self, place: Rendezvous, ranks: int, program: tuple[str, ...], limit_s: int, mounts: tuple[Mount, ...]
    ) -> RunSpec:
        user = steering.uid()
        image, vendor = self.subject.image.reference, self.job.vendor
        needs = vendors.module(vendor).container_needs()
        fabric = tuple(str(path) for path in sorted(INFINIBAND.glob("*"))) if vendor != "cpu" else ()
        spec = RunSpec(
            image=image,
            entrypoint=(interpreter.find(image, self.engine, self.subject.accepted_python).path,),
            command=(
                *(*run.ISOLATED, f"{run.RUNNER}/launcher.py", "-m", "torch.distributed.run"),
                *(f"--nnodes={place.nodes}", f"--node-rank={place.rank}", f"--nproc-per-node={ranks}"),
                *(f"--master-addr={place.address}", f"--master-port={place.port}"),
                *("-m", *program),
            ),
            user=f"{user}:{user}",
            env=self._environment(dict(needs.env)),
            mounts=(
                Mount(source=self.suite / inputs.RUNNER, target=run.RUNNER),
                Mount(source=self.suite / "tests", target=TESTS),
                *mounts,
            ),
            devices=fabric,
            shm_size_bytes=run.SHM_SIZE_BYTES[vendor],
            quota_bytes=run.QUOTA_BYTES if mounts else None,
            network="host",
            workdir="/tmp",  # noqa: S108  # the container's own
            timeout_s=limit_s,
        )
        return with_devices(spec, needs)

    def _environment(self, needed: dict[str, str]) -> dict[str, str | None]:
        site = {name: value for name, value in os.environ.items() if name.startswith(SITE)}
        image = self.engine.inspect(self.subject.image.reference).env
        chosen = dict(vendors.site_environment()) | site
        env = steering.environment(image, self.job.vendor, chosen, needed, USER_ENV)
        return env | {"PYTHONPATH": f"{TESTS}/acceptance"}


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
        user = steering.uid()
        os.chown(folder, user, user)
    return folder
