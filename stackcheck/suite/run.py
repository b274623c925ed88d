"""Run the acceptance suites inside an image, with no more rights than they need.

In: an image, a host, a tier. Out: in `build/<name>/` run.json (what the suites were told), container.log and
`run/` (result.json, junit.xml), and the parsed `RunResult`. The container may write in `run/`, so what is
read there is foreign, and what the tool writes itself lies beside it.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import re
import shutil
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

from stackcheck import vendors
from stackcheck.engine.client import Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.oci.documents import sha256
from stackcheck.suite import consistency, device_leases, inputs, results

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from stackcheck.engine.client import Engine
    from stackcheck.matrix.matrix import Tier
    from stackcheck.suite.subject import Subject

# Longer than the slowest healthy run of a tier; the suites' own watchdogs fire much earlier.
TIMEOUT_S: dict[Tier, float] = {"smoke": 30 * 60, "standard": 90 * 60, "soak": 24 * 3600}
# NCCL, RCCL and DataLoader workers share buffers through /dev/shm; 64 MiB, Docker's default, is too little.
SHM_SIZE_BYTES = {"cpu": 1 << 30, "amd": 16 << 30, "nvidia": 16 << 30}
CONTAINER_USER = 1000
# What an image sets for its own users must not choose among the checks, or take their asserts away.
OWN_PYTHON = {"PYTHONOPTIMIZE": "", "PYTEST_ADDOPTS": "", "PYTEST_PLUGINS": ""}
LAST_LINES = 15
# An older result is not used again, and `stackcheck images` renews a certificate older than this; `verify`
# accepts 30 days by default.
RENEW_AFTER = dt.timedelta(days=7)
# pytest's lines with a share done, the suites' own header, and its closing list of failures.
PROGRESS = re.compile(r"\[ *\d+%\]$|^stackcheck: |^(FAILED|ERROR) ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that decides a run; equal keys mean that a result still holds."""

    subject: Subject
    host: vendors.Host
    tier: Tier
    inputs: inputs.Inputs

    def key(self) -> dict[str, object]:
        """What a later run has to match for this one's result to stand."""
        return {
            "image": self.subject.image.config_digest,
            "host": self.host.digest(),
            "tier": self.tier,
            **self.inputs.as_json(),
        }


def plan(
    subject: Subject,
    *,
    tier: Tier,
    root: Path,
    out: Path,
) -> Plan:
    """Freeze the suites and look at the host."""
    frozen = inputs.freeze(root, out / "suite")
    return Plan(subject=subject, host=vendors.host(subject.vendor), tier=tier, inputs=frozen)


def earlier_result(plan: Plan, out: Path) -> results.RunResult | None:
    """The result of an earlier run of the same plan, as that run left it; None when anything differs."""
    path = out / "run" / "result.json"
    try:
        key = json.loads((out / "key.json").read_bytes())
        body = results.read(path)
        if key != plan.key() | {"result": sha256(body)}:
            return None
        result = results.parse(body, where=str(path))
        consistency.refuse_other(result, _run_file(plan, result.run_id), path)
    except (OSError, ValueError, ChecksFailedError):
        return None  # nothing, or not whole: run again, which says more than the old file could
    if result.finished is None or result.state != "finished":
        return None
    now = dt.datetime.now(dt.UTC)
    recent = result.started <= result.finished <= now and now - result.finished <= RENEW_AFTER
    return result if recent else None


def run(plan: Plan, engine: Engine, *, out: Path, report: Callable[[str], None]) -> results.RunResult:
    """Run the suites of a plan in its image and read what they wrote.

    Raises:
        ChecksFailedError: The container ended without a result that can be read.
    """
    folder = _fresh_folder(out)
    run_id = _tell(plan, out / "run.json")
    needs = vendors.module(plan.host.vendor).container_needs()
    report(f"{plan.subject.name}: {plan.tier} suites start; {needs.remark}")
    spec = _container(plan, needs, out, folder)
    tail: deque[str] = deque(maxlen=LAST_LINES)
    before = dt.datetime.now(dt.UTC)
    with (out / "container.log").open("w", encoding="utf-8") as log:
        code = engine.run(dataclasses.replace(spec, on_line=_tee(log.write, tail, report)))
    after = dt.datetime.now(dt.UTC)
    result, digest = _read(plan, folder, code, run_id, tail)
    consistency.refuse_times(result, before, after, folder / "result.json")
    key = json.dumps(plan.key() | {"result": digest}, indent=2).encode()
    write_atomically(out / "key.json", (key,))
    return result


def _fresh_folder(out: Path) -> Path:
    (out / "key.json").unlink(missing_ok=True)  # from here on the earlier result does not hold
    folder = out / "run"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(folder, CONTAINER_USER, CONTAINER_USER)
    return folder


def _container(plan: Plan, needs: vendors.ContainerNeeds, out: Path, folder: Path) -> RunSpec:
    told = out / "run.json"
    user = CONTAINER_USER if os.geteuid() == 0 else os.geteuid()
    leases = device_leases.mounts(plan.host.vendor)
    return RunSpec(
        image=plan.subject.image.reference,
        command=_command(plan, leases),
        user=f"{user}:{user}",
        env={
            **dict(vendors.site_environment()),
            **dict(needs.env),
            **USER_ENV,
            **OWN_PYTHON,
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        mounts=(
            Mount(source=out / "suite" / "tests", target="/stackcheck/tests", read_only=True),
            Mount(source=out / "suite" / "trainers", target="/stackcheck/trainers", read_only=True),
            Mount(source=told, target="/stackcheck/run.json", read_only=True),
            Mount(source=folder, target="/stackcheck/out", read_only=False),
            *leases,
            *(Mount(source=bind.source, target=bind.target, read_only=True) for bind in needs.binds),
        ),
        devices=needs.devices,
        group_add=needs.groups,
        ulimits=dict(needs.ulimits),
        shm_size_bytes=SHM_SIZE_BYTES[plan.host.vendor],
        workdir="/tmp",  # noqa: S108  # the container's own tmpfs
        timeout_s=TIMEOUT_S[plan.tier],
    )


def _command(plan: Plan, leases: Iterable[Mount]) -> tuple[str, ...]:
    # One word an option: pytest takes a lone path for something to collect, and looks for its settings there.
    return (
        *("python3", "-m", "pytest", "/stackcheck/tests", "-p", "no:cacheprovider"),
        *(f"--gpu-vendor={plan.host.vendor}", f"--tier={plan.tier}"),
        *("--run-file=/stackcheck/run.json", "--result-dir=/stackcheck/out"),
        *(f"--lease-dir={mount.target}" for mount in leases),
    )


def _tell(plan: Plan, path: Path) -> str:
    """Write what the suites are told, and return the id of this run."""
    run_id = uuid.uuid4().hex
    path.write_text(json.dumps(_run_file(plan, run_id), indent=2), encoding="utf-8")
    path.chmod(0o644)
    return run_id


def _run_file(plan: Plan, run_id: str) -> dict[str, Any]:
    image = plan.subject.image
    return {
        "run_id": run_id,
        "tier": plan.tier,
        "stack_id": image.stack_id,
        "image": {
            "reference": image.reference,
            "config_digest": image.config_digest,
            "manifest_digest": image.manifest_digest,
        },
        "inputs": plan.inputs.as_json(),
        "host": plan.host.as_json(),
    }


def _tee(
    log: Callable[[str], object], tail: deque[str], report: Callable[[str], None]
) -> Callable[[str], None]:
    """Keep every line; report those that say how far the run is, or what failed."""

    def both(line: str) -> None:
        log(line + "\n")
        tail.append(line)
        if PROGRESS.search(line):
            report(line.replace("../stackcheck/tests/acceptance/", ""))

    return both


def _read(
    plan: Plan, folder: Path, code: int, run_id: str, tail: Iterable[str]
) -> tuple[results.RunResult, str]:
    """The result of the run that just ended, and the digest of its file."""
    path = folder / "result.json"
    if not os.path.lexists(path):
        raise ChecksFailedError(
            "the suites ended without a result",
            where=str(path),
            got=f"exit code {code}; the log ends with:\n    " + "\n    ".join(tail),
            expected="result.json, written from the first check on",
            next_step=f"read {folder.with_name('container.log')}",
        )
    body = results.read(path)
    result = results.parse(body, where=str(path))
    if result.run_id != run_id:
        raise ChecksFailedError(
            "the suites left the result of another run", where=str(path), got=result.run_id, expected=run_id
        )
    consistency.refuse_other(result, _run_file(plan, run_id), path)
    return result, sha256(body)
