"""One node's share of a program on several nodes. In: a job, this node's place, a program. Out: a `RunSpec`.

The container has the host's network, and with GPUs the InfiniBand devices and pinned memory; nothing else of
a fleet has them. The site chooses the network interface: its variables are passed on.
"""

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stackcheck import vendors
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.engine.devices import with_devices
from stackcheck.errors import ChecksFailedError
from stackcheck.fleet.gate import NotUpError
from stackcheck.fleet.job import Job
from stackcheck.fleet.rendezvous import Rendezvous
from stackcheck.suite import container_user, inputs, interpreter, run, steering
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
    """How programs are started on this node.

    Attributes:
        suite: The frozen copy of suites and trainers.
    """

    job: Job
    subject: Subject
    engine: Engine
    suite: Path

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
        return EndedProgram(lines=[*lines], error=_words(code, [*lines]) if code else None)

    def _container(
        self, place: Rendezvous, ranks: int, program: tuple[str, ...], limit_s: int, mounts: tuple[Mount, ...]
    ) -> RunSpec:
        user = container_user.uid()
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


def _words(code: int, lines: list[str]) -> str:
    """Why a program failed: its exit code, and its last lines."""
    return f"exit code {code}: " + " | ".join(lines[-3:])[-400:]
