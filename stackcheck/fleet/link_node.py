"""What one node does in a links job. In: a job and its plan. Out: one report a round, in the job's folder.

A round starts when every node has ended the one before, or its time is over: a pair that hangs must not
make the next pair of its nodes look bad. The container has the host's network, and with GPUs the InfiniBand
devices and pinned memory.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck import vendors
from stackcheck.engine.client import Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet import link_stage
from stackcheck.fleet.link_stage import Plan, Report
from stackcheck.suite import container_user, inputs, interpreter, run, steering

if TYPE_CHECKING:
    from collections.abc import Callable

    from stackcheck.engine.client import Engine
    from stackcheck.fleet.job import Job
    from stackcheck.fleet.link_stage import Group
    from stackcheck.suite.interpreter import Interpreter
    from stackcheck.suite.subject import Subject

SLACK_S = 15
TAIL = 20  # lines of a program that are kept
TESTS = "/stackcheck/tests"
INFINIBAND = Path("/dev/infiniband")
SITE = ("GLOO_", "TP_")  # which interface gloo uses; vendors.site_environment has NCCL's


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkNode:
    """One node of a links job."""

    job: Job
    subject: Subject
    engine: Engine
    name: str
    attempt: Path
    suite: Path
    report: Callable[[str], None]

    def play(self) -> None:
        """Every round in order."""
        plan = Plan.model_validate_json((self.job.folder / link_stage.PLAN).read_bytes())
        found = interpreter.find(self.subject.image.reference, self.engine, self.subject.accepted_python)
        for number, groups in enumerate(plan.rounds):
            group = next((group for group in groups if self.name in group.names), None)
            told = self._group(group, found, plan.limit_s) if group else Report()
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

    def _group(self, group: Group, found: Interpreter, limit_s: int) -> Report:
        """Work together with the others of a group."""
        rank = group.names.index(self.name)
        self.report(f"link: {' - '.join(group.names)}")
        lines: deque[str] = deque(maxlen=TAIL)
        spec = self._container(group, rank, found, limit_s)
        try:
            code = self.engine.run(dataclasses.replace(spec, on_line=lines.append))
        except ChecksFailedError:
            return Report(error=f"did not end within {limit_s} s")
        if code:
            return Report(error=f"exit code {code}: " + " | ".join(list(lines)[-3:])[-400:])
        return link_stage.parse_line(list(lines)) if rank == 0 else Report()

    def _container(self, group: Group, rank: int, found: Interpreter, limit_s: int) -> RunSpec:
        user = container_user.uid()
        image, vendor = self.subject.image.reference, self.job.vendor
        needs = vendors.module(vendor).container_needs()
        site = {name: value for name, value in os.environ.items() if name.startswith(SITE)}
        env = steering.environment(
            self.engine.inspect(image).env,
            vendor,
            dict(vendors.site_environment()) | site,
            dict(needs.env),
            USER_ENV,
        )
        fabric = tuple(str(path) for path in sorted(INFINIBAND.glob("*"))) if vendor != "cpu" else ()
        return RunSpec(
            image=image,
            entrypoint=(found.path,),
            command=(
                *(*run.ISOLATED, f"{run.RUNNER}/launcher.py", "-m", "torch.distributed.run"),
                *(
                    f"--nnodes={len(group.names)}",
                    f"--node-rank={rank}",
                    f"--nproc-per-node={self.job.devices or 1}",
                ),
                *(f"--master-addr={group.address}", f"--master-port={group.port}"),
                *("-m", "workloads.fleet_link", str(limit_s)),
            ),
            user=f"{user}:{user}",
            env=env | {"PYTHONPATH": f"{TESTS}/acceptance"},
            mounts=(
                Mount(source=self.suite / inputs.RUNNER, target=run.RUNNER),
                Mount(source=self.suite / "tests", target=TESTS),
                *(Mount(source=bind.source, target=bind.target) for bind in needs.binds),
            ),
            devices=(*needs.devices, *fabric),
            group_add=needs.groups,
            ulimits=dict(needs.ulimits),
            shm_size_bytes=run.SHM_SIZE_BYTES[vendor],
            network="host",
            workdir="/tmp",  # noqa: S108  # the container's own
            timeout_s=limit_s,
        )
