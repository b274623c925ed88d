"""Run the acceptance suites on an image, whose container has no more rights than it needs.

In: a subject, a host, a tier. Out: the parsed `RunResult`, and in `build/<name>/` run.json (which tells the
suites about image and host), container.log, key.json (what the result depends on) and `run/` (result.json,
junit.xml). The suites run beside the container (`suite.controller`), which starts their children. It can
write to `run/inside/` alone, and no file there is evidence of the suites.
"""

import dataclasses
import datetime as dt
import json
import os
import re
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from stackcheck import vendors
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.engine.devices import with_devices
from stackcheck.errors import ChecksFailedError, NothingSelectedError
from stackcheck.files.atomic import file_error, write_atomically
from stackcheck.oci.documents import sha256
from stackcheck.policy import Tier
from stackcheck.suite import consistency, controller, inputs, interpreter, results, steering
from stackcheck.suite.results import ReportedInterpreter
from stackcheck.suite.subject import Subject
from stackcheck.vendors import seen

# Longer than the slowest healthy run of a tier; the suites' own watchdogs fire much earlier.
TIMEOUT_S: dict[Tier, float] = {"gate": 5 * 60, "smoke": 30 * 60, "standard": 90 * 60, "soak": 24 * 3600}
# NCCL, RCCL and DataLoader workers share buffers through /dev/shm; Docker's default of 64 MiB is too small.
SHM_SIZE_BYTES = {"cpu": 1 << 30, "amd": 16 << 30, "nvidia": 16 << 30}
QUOTA_BYTES = 4 << 30  # for run/: a healthy run leaves some megabytes, a hang some traces more
BUSY = "busy.json"  # how long each device worked during the run, by its driver
RUNNER = "/stackcheck/runner"  # as tests/conftest.py spells it
ISOLATED = controller.ISOLATED
# https://docs.pytest.org/en/stable/reference/exit-codes.html
NO_CHECKS = {4: "pytest does not understand the expression", 5: "no check matches"}
LAST_LINES = 15  # of the log, shown when a run ends without a result
# pytest's lines with a percentage, the suites' own header, and the list of failures at the end.
PROGRESS = re.compile(r"\[ *\d+%\]$|^stackcheck: |^(FAILED|ERROR) ")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Everything that a run depends on. The result of a run is valid for every plan with an equal key."""

    subject: Subject
    host: vendors.Host
    tier: Tier
    inputs: results.ReportedInputs
    only: str | None = None  # pytest's -k; such a run measures, and never gets a verdict
    case_seed: int = 0  # of the generated cases

    @property
    def options(self) -> tuple[str, ...]:
        """The options of pytest beside vendor and tier."""
        seed = (f"--case-seed={self.case_seed}",) if self.case_seed else ()
        return (*seed, *((f"-k={self.only}",) if self.only else ()))

    def key(self) -> dict[str, object]:
        """What must be equal for the result of an earlier run to be used again."""
        accepted = self.subject.accepted_python
        return {
            "image": self.subject.image.config_digest,
            "host": self.host.digest(),
            "tier": self.tier,
            **({"only": self.only} if self.only else {}),
            **({"case_seed": self.case_seed} if self.case_seed else {}),
            **({"accepted_python": sorted(accepted)} if accepted else {}),
            **self.inputs.model_dump(),
        }


def plan(subject: Subject, *, tier: Tier, root: Path, out: Path, case_seed: int = 0) -> RunPlan:
    """Freeze the suites of the checkout `root` in `out`/suite, and read the host."""
    frozen = inputs.freeze(root, out / "suite")
    host = vendors.host(subject.vendor)
    return RunPlan(subject=subject, host=host, tier=tier, inputs=frozen, case_seed=case_seed)


def earlier_result(plan: RunPlan, out: Path) -> results.RunResult | None:
    """The result of an earlier run with the same key; `None` if no such run exists, or it is too old."""
    path = out / "run" / "result.json"
    try:
        key = json.loads((out / "key.json").read_bytes())
        body = results.read_result_file(path)
        if key != plan.key() | {"result": sha256(body)}:
            return None
        result = results.parse(body, where=str(path))
        consistency.require_same_run(result, _run_file(plan, result.run_id), path)
    except (OSError, ValueError, ChecksFailedError):
        return None  # missing or damaged: a new run reports more than the old file can
    if result.finished is None or result.state != "finished":
        return None
    now = dt.datetime.now(dt.UTC)
    recent = (
        result.started <= result.finished <= now and now - result.finished <= plan.subject.policy.renew_after
    )
    return result if recent else None


def run(plan: RunPlan, engine: Engine, *, out: Path, report: Callable[[str], None]) -> results.RunResult:
    """Run the suites of a plan in its image, and read and check what they wrote to `out` (`build/<name>/`).

    Raises:
        ChecksFailedError: The image's Python belongs to no package; or there is no result, it cannot be read,
            it does not belong to this run, or the container's exit code contradicts it.
        NothingSelectedError: `only` selects no check.
        EngineError: The container could not be started.
    """
    found = interpreter.find(plan.subject.image.reference, engine, plan.subject.accepted_python)
    user = steering.uid()
    # An empty `run/` for the controller, and in it a folder that the container's user may write to. No other
    # user of the host can reach them.
    (out / "key.json").unlink(missing_ok=True)  # from here on the earlier result is not valid
    folder = out / "run" / controller.INSIDE
    _remove(folder.parent)
    folder.mkdir(parents=True)
    out.chmod(0o700)  # the container sees its folder by the mount
    if os.geteuid() == 0:
        os.chown(folder, user, user)
    run_id = _write_run_file(plan, found, out / "run.json")
    needs = vendors.module(plan.host.vendor).container_needs()
    report(f"{plan.subject.name}: {plan.tier} suites start; {needs.remark}")
    declared = engine.inspect(plan.subject.image.reference).env
    spec = _container(plan, needs, found=found, declared=declared, out=out, user=user)
    leases = controller.folders(plan.host.vendor)
    judge = controller.beside(out, plan.host.vendor, plan.tier, plan.options, leases=leases)
    tail: deque[str] = deque(maxlen=LAST_LINES)
    before = dt.datetime.now(dt.UTC)
    with (out / "container.log").open("w", encoding="utf-8") as log:
        judge.report_to(_tee(log.write, tail, report))
        with seen.watched(plan.host) as worked_s:
            # What the image prints is in the log.
            on_line = _tee(log.write, tail, lambda _line: None)
            engine.run(dataclasses.replace(spec, beside=judge, on_line=on_line))
    write_atomically(out / BUSY, (json.dumps(worked_s).encode(),))
    after = dt.datetime.now(dt.UTC)
    result, digest = _read(plan, found, out=out, code=judge.require_end(tail), run_id=run_id, tail=tail)
    consistency.require_times_within(result, before, after, out / "run" / "result.json")
    key = json.dumps(plan.key() | {"result": digest}, indent=2).encode()
    write_atomically(out / "key.json", (key,))
    return result


def busy_s(out: Path) -> dict[str, float | None]:
    """How long each device worked during the run in `out`, by its driver; empty if nobody looked."""
    try:
        found: dict[str, float | None] = json.loads((out / BUSY).read_bytes())
    except (OSError, ValueError):
        return {}
    return found


def _remove(folder: Path) -> None:
    """Remove the files of an earlier run, also folders that it left without permissions.

    Raises:
        FileError: Something cannot be removed.
    """
    if not os.path.lexists(folder):
        return
    try:
        for place, names, _ in os.walk(folder):
            for name in names:
                path = Path(place, name)
                if not path.is_symlink():
                    path.chmod(0o700)
        shutil.rmtree(folder)
    except OSError as error:
        raise file_error(error, folder) from error


def _container(
    plan: RunPlan,
    needs: vendors.ContainerNeeds,
    *,
    found: ReportedInterpreter,
    declared: Iterable[str],
    out: Path,
    user: int,
) -> RunSpec:
    suite, run_folder = out / "suite", out / "run"
    spec = RunSpec(
        image=plan.subject.image.reference,
        entrypoint=(found.path,),
        command=("-u", *controller.AGENT),
        user=f"{user}:{user}",
        env=steering.environment(
            declared, plan.host.vendor, dict(vendors.site_environment()), dict(needs.env), USER_ENV
        ),
        mounts=(
            Mount(source=suite / "tests", target="/stackcheck/tests", read_only=True),
            Mount(source=suite / "trainers", target="/stackcheck/trainers", read_only=True),
            Mount(source=run_folder / controller.INSIDE, target="/stackcheck/out", read_only=False),
        ),
        shm_size_bytes=SHM_SIZE_BYTES[plan.host.vendor],
        quota_bytes=QUOTA_BYTES,
        quota_folders=(run_folder / "children",),
        workdir="/tmp",  # noqa: S108  # the container's own tmpfs
        timeout_s=TIMEOUT_S[plan.tier],
    )
    return with_devices(spec, needs)


def command(vendor: vendors.Vendor, tier: Tier, only: str | None = None) -> tuple[str, ...]:
    """What follows the image's Python where no program of stackcheck can run beside it:
    in a pod of Kubernetes.

    Such a run measures. It has no wall between the suites and the image, so it certifies nothing.
    """
    # Each option and its value are one word: pytest would collect from a path that stands alone.
    return (
        *ISOLATED,
        *(f"{RUNNER}/launcher.py", "-m", "pytest", "/stackcheck/tests", "-p", "no:cacheprovider"),
        *(f"--gpu-vendor={vendor}", f"--tier={tier}"),
        *("--run-file=/stackcheck/run.json", "--result-dir=/stackcheck/out"),
        *((f"-k={only}",) if only else ()),
    )


def _write_run_file(plan: RunPlan, found: ReportedInterpreter, path: Path) -> str:
    """Write run.json for a new run, and return the id of that run."""
    run_id = uuid.uuid4().hex
    facts = _run_file(plan, run_id) | {"interpreter": found.model_dump(exclude_defaults=True)}
    path.write_text(json.dumps(facts, indent=2), encoding="utf-8")
    path.chmod(0o644)
    return run_id


def _run_file(plan: RunPlan, run_id: str) -> dict[str, Any]:
    """The content of run.json: what the suites cannot find out inside the container."""
    return {
        "run_id": run_id,
        "tier": plan.tier,
        "stack_id": plan.subject.image.stack_id,
        "image": plan.subject.as_tested,
        "inputs": plan.inputs.model_dump(),
        "host": plan.host.as_json(),
    }


def _tee(
    log: Callable[[str], object], tail: deque[str], report: Callable[[str], None]
) -> Callable[[str], None]:
    """A function that logs every line, and reports those that show progress or a failure."""

    def both(line: str) -> None:
        log(line + "\n")
        tail.append(line)
        if PROGRESS.search(line):
            report(line.replace("../stackcheck/tests/acceptance/", ""))

    return both


def _read(
    plan: RunPlan, found: ReportedInterpreter, *, out: Path, code: int, run_id: str, tail: Iterable[str]
) -> tuple[results.RunResult, str]:
    """The result of the run that just ended, and the digest of result.json."""
    path = out / "run" / "result.json"
    if plan.only and code in NO_CHECKS:
        raise NothingSelectedError(
            NO_CHECKS[code],
            where="-k",
            got=plan.only,
            expected="words of names in tests/acceptance/checks.json; `and`, `or`, `not`, brackets",
            next_step=f"correct -k; what pytest printed is in {out / 'container.log'}",
        )
    if not os.path.lexists(path):
        raise ChecksFailedError(
            "the suites ended without a result",
            where=str(path),
            got=f"exit code {code}{consistency.signal_of(code)}; the log ends with:\n    "
            + "\n    ".join(tail),
            expected="result.json, which the suites write from the first check on",
            next_step=f"read {out / 'container.log'}",
        )
    body = results.read_result_file(path)
    result = results.parse(body, where=str(path))
    if result.run_id != run_id:
        raise ChecksFailedError(
            "result.json belongs to a different run",
            where=str(path),
            got=f"run id {result.run_id}",
            expected=f"run id {run_id}",
            next_step=consistency.RUN_AGAIN,
        )
    consistency.require_same_run(result, _run_file(plan, run_id), path)
    consistency.require_interpreter(result, found.model_dump(exclude_defaults=True), path)
    consistency.require_exit_code(result, code, path)
    return result, sha256(body)
