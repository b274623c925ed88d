"""Run the suites in an image and judge the run: the only caller of `suite.run.run` and of `verdict.judge`.

In: a subject, a tier, a folder. Out: a `JudgedRun`, and verdict.json in that folder. The flow, a night, a
pair, a search and a node of a fleet differ in what they run and in what follows, never in how.
"""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

from stackcheck.engine.container import USER_ENV, RunSpec
from stackcheck.errors import ChecksFailedError
from stackcheck.files.atomic import write_atomically
from stackcheck.policy import is_enough
from stackcheck.suite import (
    bounds,
    certifiable,
    container_user,
    foreign,
    interpreter,
    requirements,
    run,
    sbom,
    steering,
    verdict,
)
from stackcheck.suite.last_run import CANNOT_CERTIFY
from stackcheck.vendors import seen

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from stackcheck.engine.client import Engine
    from stackcheck.policy import Tier
    from stackcheck.suite.interpreter import Interpreter
    from stackcheck.suite.requirements import Requirements
    from stackcheck.suite.results import RunResult
    from stackcheck.suite.run import RunPlan
    from stackcheck.suite.subject import Subject
    from stackcheck.suite.verdict import Status, Verdict


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A run of the suites and its verdict.

    Attributes:
        plan: What ran, and on which host.
        result: What the suites measured.
        verdict: PASSED, FAILED or UNFIT, with reasons.
        folder: `build/<name>/`, with the log of the run.
        reused: Whether the result is of an earlier run, because nothing has changed since.
        record: Digest of the run's record in the history; None if it is not kept.
    """

    plan: RunPlan
    result: RunResult
    verdict: Verdict
    folder: Path
    reused: bool
    record: str | None = None

    def require(self, *accepted: Status) -> None:
        """Raise the error of the verdict, unless its status is one of `accepted`.

        Raises:
            MachineUnfitError: The verdict is UNFIT.
            ChecksFailedError: The verdict is FAILED.
        """
        if self.verdict.status not in accepted:
            raise verdict.refusal(self.verdict, self.folder)

    def judged_as(self, changed: Verdict) -> JudgedRun:
        """The same run with a verdict that further measurements changed, also in verdict.json."""
        _write(changed, self.folder)
        return dataclasses.replace(self, verdict=changed)


def run_and_judge(
    subject: Subject,
    engine: Engine,
    *,
    tier: Tier,
    root: Path,
    out: Path,
    report: Callable[[str], None],
    reuse: Callable[[RunResult], bool],
) -> JudgedRun:
    """Run the suites, or take the earlier result if nothing changed; then judge it.

    `reuse` says whether the earlier result in `out`, of the same plan, may stand for a new run.

    Raises:
        ChecksFailedError: The run has no valid result, or an image from elsewhere lacks what the suites need.
    """
    plan = run.plan(subject, tier=tier, root=root, out=out)
    for reason in certifiable.before_a_run(subject, plan.host, tier, root):
        report(f"{subject.name}: this run cannot end PASSED: {reason}")
    earlier = run.earlier_result(plan, out)
    kept = earlier if earlier and reuse(earlier) else None
    if kept:
        report(f"{subject.name}: not run again: same image, suites, thresholds and host")
    required = requirements.of(subject, plan.host, tier, root)
    if subject.stack is None:
        packages = sbom.load_or_create(subject.image, engine, out, report, accepted=subject.accepted_python)
        required = dataclasses.replace(required, known_issues=foreign.issues(packages, plan.host, root))
        for issue in required.known_issues:
            report(f"{subject.name}: known issue {issue.id}: {issue.symptom} ({issue.issue}; {issue.fix})")
        if kept is None:
            require_packages(packages, subject, engine)
    result = kept or measure(plan, engine, out=out, report=report)
    found = judge(result, dataclasses.replace(required, seen=seen.look(plan.host, run.busy_s(out))), root)
    _write(found, out)
    _announce(plan, result, found, report)
    return JudgedRun(plan=plan, result=result, verdict=found, folder=out, reused=kept is not None)


def measure(
    plan: RunPlan, engine: Engine, *, out: Path, report: Callable[[str], None], only: str | None = None
) -> RunResult:
    """Run a plan without a verdict; `only` selects checks (pytest's -k)."""
    return run.run(dataclasses.replace(plan, only=only), engine, out=out, report=report)


def judge(result: RunResult, required: Requirements, root: Path, ask: bounds.Ask | None = None) -> Verdict:
    """The verdict of the checkout `root` on a run; `ask` is for a caller that keeps answers about bounds."""
    return verdict.judge(result, required, bounds.look_up(result, root, ask))


def _announce(plan: RunPlan, result: RunResult, found: Verdict, report: Callable[[str], None]) -> None:
    name, vendor = plan.subject.name, plan.subject.vendor
    if not is_enough(plan.tier, plan.subject.policy.certifies[vendor]):
        report(f"{name}: a {plan.tier} run does not certify {vendor}; {CANNOT_CERTIFY}")
    report(f"{name}: {found.words(len(result.checks))}")
    for waiver in found.waivers:
        if any(waiver.covers(check) for check in found.warned):
            report(f"{name}: {waiver.words()}")


def _write(found: Verdict, folder: Path) -> None:
    write_atomically(folder / "verdict.json", (json.dumps(found.as_json(), indent=2).encode(),))


# Without these packages nearly every check would fail, each with a reason of its own, after minutes.
# A package, by the one name that pip and `import` both use -> why.
NEEDED = {
    "torch": "torch, which is what is tested",
    "numpy": "NumPy, which torch's wheel does not bring: torch.distributed needs it to exchange objects",
}
# It looks where `import` would look, and imports nothing.
ASK = """
import json, sys
from importlib.util import find_spec
print(json.dumps([name for name in sys.argv[1:] if find_spec(name) is None]))
"""
TIMEOUT_S = 120


def require_packages(document: dict[str, Any], subject: Subject, engine: Engine) -> None:
    """Refuse an image whose Python does not find what the suites need.

    Raises:
        ChecksFailedError: A package of `NEEDED` is in no place of the image, or in one that the first Python
            on its PATH does not search, or that Python cannot be started.
    """
    _require_listed(document, subject.name)
    python = interpreter.find(subject.image.reference, engine, subject.accepted_python)
    _require_found(python, subject, engine)


def _require_listed(document: dict[str, Any], name: str) -> None:
    found = [item["name"] for item in document["components"] if "pkg:pypi/" in str(item.get("purl", ""))]
    missing = [package for package in NEEDED if package not in found]
    if missing:
        raise ChecksFailedError(
            f"the image has no {missing[0]}",
            where=name,
            got=f"{len(found)} Python packages, no {' and no '.join(missing)} among them",
            expected=f"{NEEDED[missing[0]]}, in the Python that PATH names first",
            next_step=f"add to its Dockerfile: RUN python3 -m pip install {' '.join(missing)}",
        )


def _require_found(python: Interpreter, subject: Subject, engine: Engine) -> None:
    lines: list[str] = []
    code = engine.run(_question(python, subject.image.reference, engine, lines))
    missing = _answer(lines[-1]) if lines and not code else None
    if missing is None:
        raise ChecksFailedError(
            "the image's Python cannot be started by the user who runs the suites",
            where=f"{subject.name}: {python.path}",
            got=f"exit code {code}; last lines:\n    " + "\n    ".join(line[:200] for line in lines[-5:]),
            expected="a Python that every user can start",
            next_step="move it out of a home folder such as /root, or give every user the right to read it",
        )
    if missing:
        raise ChecksFailedError(
            f"the image's Python does not find the installed {' and '.join(missing)}",
            where=f"{subject.name}: {python.path}",
            got="packages in a place that this Python does not search, or that only root can read",
            expected=f"{NEEDED[missing[0]]}, in the Python that PATH names first",
            next_step="put the folder of the right Python first: ENV PATH=/opt/conda/envs/NAME/bin:$PATH",
        )


def _question(python: Interpreter, reference: str, engine: Engine, lines: list[str]) -> RunSpec:
    user, env = container_user.uid(), engine.inspect(reference).env
    return RunSpec(
        image=reference,
        entrypoint=(python.path,),
        command=("-I", "-B", "-c", ASK, *NEEDED),
        user=f"{user}:{user}",
        env={**dict.fromkeys(filter(steering.is_neutralised, env)), **USER_ENV},
        workdir="/tmp",  # noqa: S108  # the container's own
        timeout_s=TIMEOUT_S,
        on_line=lines.append,
    )


def _answer(line: str) -> list[str] | None:
    """The names that are missing; None for a line of another form."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return [name for name in NEEDED if name in found] if isinstance(found, list) else None
