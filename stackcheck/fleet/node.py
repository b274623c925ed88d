"""What one node of a fleet does: `python -m stackcheck.fleet.node FOLDER`; the engine starts it there.

In: the folder of a job, and the engine's variables, which say which node this is. Out:
`attempt-<n>/<rank>/` in that folder: state.json, host.json, run.json, progress.log, container.log and
result.json. The image is compared with the digest of the job first; then the suites run by the same code as
on one machine (`suite.judged.measure`).
"""

import contextlib
import dataclasses
import json
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import NoReturn

from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, EngineError, StackcheckError
from stackcheck.files import strictjson
from stackcheck.files.regular import read_regular
from stackcheck.fleet import rendezvous, stored
from stackcheck.fleet.job import Job, NodeState, subject_of
from stackcheck.fleet.together import Torchrun
from stackcheck.imaging.image import Image
from stackcheck.oci.documents import sha256
from stackcheck.suite import run
from stackcheck.suite.judged import measure

RESULT = "run/result.json"
KEPT = ("run.json", "container.log", RESULT, "run/junit.xml")  # from the node's own disk
LARGEST = 64 << 20  # bytes of one file, twice the largest result
STOPPED = 143  # 128 + SIGTERM, as shells say it
PODMAN_SOCKETS = ("/run/podman/podman.sock", "/run/user/{uid}/podman/podman.sock")


class _StoppedError(Exception):
    """The engine stopped this node: the job was cancelled, requeued, or is out of time."""


def main(arguments: list[str]) -> int:
    """Run this node's part of a job; the exit code."""
    job = Job.load(Path(arguments[0]))
    rank = int(os.environ["SLURM_ARRAY_TASK_ID"]) if job.array else rendezvous.find(os.environ).rank
    folder = job.attempt(int(os.environ.get("SLURM_RESTART_COUNT", "0"))) / str(rank)
    begun = NodeState(rank=rank, node=name_of_node(os.environ), state="running")
    begun.write(folder)
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _stop)
        with _in_time(job.limit_s):
            read = _run(job, folder)
    except StackcheckError as error:
        ended = dataclasses.replace(begun, state="failed", code=error.exit_code, error=str(error))
    except _StoppedError:
        ended = dataclasses.replace(
            begun, state="stopped", code=STOPPED, error="the engine stopped this node"
        )
    else:
        ended = dataclasses.replace(begun, state="ended", result=read)
    _ignore_signals()  # the last file is on its way
    ended.write(folder)
    if ended.error:
        sys.stderr.write(f"error: {ended.error}\n")
    return ended.code


def name_of_node(variables: Mapping[str, str]) -> str:
    """The name that the engine has for this node, else the kernel's."""
    return variables.get("SLURMD_NODENAME") or variables.get("NODE_NAME") or platform.node()


def _run(job: Job, folder: Path) -> str | None:
    """Verify the image, run the suites, and hand over the files, those of a failed run too.

    Returns:
        The digest of the result.json that was handed over, if it is strict JSON.
    """
    read = None
    with tempfile.TemporaryDirectory(prefix="stackcheck-fleet-", ignore_cleanup_errors=True) as scratch:
        out = Path(scratch) / "run"
        out.mkdir()
        subject = subject_of(job.name, Path(job.root), job.vendor, job.accepted_python)
        require_image(subject.image, job)
        plan = run.plan(subject, tier=job.tier, root=Path(job.root), out=out)
        _require_inputs(plan.inputs.model_dump(), job)
        stored.put(job, folder / "host.json", json.dumps(plan.host.as_json()).encode())
        with (folder / "progress.log").open("a", encoding="utf-8", buffering=1) as log:

            def report(line: str) -> None:
                log.write(line + "\n")

            try:
                engine = connect(job)
                load_image(subject.image, engine, report)
                if job.stage != "alone":
                    programs = Torchrun(job=job, subject=subject, engine=engine, suite=out / "suite")
                    _together(programs, folder, report)
                else:
                    measure(plan, engine, out=out, report=report, only=job.only)
            finally:
                read = _hand_over(job, out, folder, report)
    return read


def _together(programs: Torchrun, folder: Path, report: Callable[[str], None]) -> None:
    """The stages in which nodes work together."""
    from stackcheck.fleet.together import LinkNode, TrainNode

    kind = LinkNode if programs.job.stage == "links" else TrainNode
    kind(programs=programs, name=name_of_node(os.environ), attempt=folder.parent, report=report).play()


def connect(job: Job) -> Engine:
    """This node's engine. podman answers Docker's API on a socket of its own.

    Raises:
        EngineError: It does not answer.
    """
    if job.container == "podman" and "DOCKER_HOST" not in os.environ:
        sockets = [Path(path.format(uid=os.getuid())) for path in PODMAN_SOCKETS]
        found = next((path for path in sockets if path.is_socket()), None)
        if found is None:
            raise EngineError(
                "podman's socket is not there",
                where=platform.node(),
                got=f"none of {', '.join(map(str, sockets))}",
                next_step="systemctl enable --now podman.socket, or with --user for a user's own",
            )
        os.environ["DOCKER_HOST"] = f"unix://{found}"
    return Engine.connect()


def require_image(image: Image, job: Job) -> None:
    """Refuse an image that is not the one of the job.

    Raises:
        ChecksFailedError: The checkout has another image now.
    """
    if (image.config_digest, image.manifest_digest) != (job.config_digest, job.manifest_digest):
        raise ChecksFailedError(
            "the image in the checkout is not the one of this job",
            where=str(image.layout),
            got=image.manifest_digest,
            expected=job.manifest_digest,
            next_step=f"stackcheck fleet run {job.name}: it tests the image that is there now",
        )


def load_image(image: Image, engine: Engine, report: Callable[[str], None]) -> None:
    """Make sure that this node's engine has exactly this image; load it where it has none, or another one.

    Raises:
        EngineError: What it has under the name is still another image.
    """
    digests = {image.config_digest, image.manifest_digest}  # the id is either, by the kind of store
    if not engine.has(image.reference) or engine.inspect(image.reference).id not in digests:
        report(f"loading {image.reference} from {image.layout}")
        engine.load(image.layout, image.reference)
    found = engine.inspect(image.reference).id
    if found not in digests:
        raise EngineError(
            "this node's engine has another image under this name",
            where=f"{platform.node()}, {image.reference}",
            got=found,
            expected=f"{image.config_digest} or {image.manifest_digest}",
            next_step=f"docker rmi {image.reference} on that node",
        )
    report(f"image verified: {image.reference} is {found}")


def _require_inputs(found: Mapping[str, str | None], job: Job) -> None:
    for name, digest in job.inputs.items():
        if found[name] != digest:
            raise ChecksFailedError(
                f"the {name} of the checkout changed after the job was submitted, or this node sees others",
                where=job.root,
                got=str(found[name]),
                expected=str(digest),
                next_step=f"stackcheck fleet run {job.name}",
            )


def _hand_over(job: Job, out: Path, folder: Path, report: Callable[[str], None]) -> str | None:
    """Copy what the run left to where the judge looks; the digest of a result.json that is strict JSON.

    A link that the container made is not followed. These very bytes are checked, and the judge trusts it.
    """
    read = None
    for name in KEPT:
        source = out / name
        if source.is_file() and not source.is_symlink():
            try:
                data = read_regular(source, LARGEST, follow=False)
                stored.put(job, folder / source.name, data)
                read = _strict_digest(data) if name == RESULT else read
            except (OSError, StackcheckError) as error:  # what does not arrive counts as missing
                report(f"{source.name} was not stored: {error}")
    return read


def _strict_digest(text: bytes) -> str | None:
    try:
        strictjson.check(text)
    except (ValueError, RecursionError):  # the judge reads it once more, and says what is wrong
        return None
    return sha256(text)


@contextlib.contextmanager
def _in_time(limit_s: int) -> Iterator[None]:
    """Raise in the body when its time is over; a container that hangs is removed on the way out."""

    def over(_signal: int, _frame: FrameType | None) -> NoReturn:
        _ignore_signals()
        raise ChecksFailedError(
            "the run on this node did not end in time",
            where=platform.node(),
            expected=f"an end within {limit_s} s",
            next_step="read the node's container.log: the last check that began is the one that hangs",
        )

    signal.signal(signal.SIGALRM, over)
    signal.alarm(limit_s)
    try:
        yield
    finally:
        signal.alarm(0)


def _stop(_signal: int, _frame: FrameType | None) -> NoReturn:
    _ignore_signals()
    raise _StoppedError


def _ignore_signals() -> None:
    """One is enough: a second one would cut the way out. Slurm sends two when the time of a job is over."""
    signal.alarm(0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
