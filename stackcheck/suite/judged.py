"""Run the suites in an image and judge the run: the only caller of `suite.run.run` and of `verdict.judge`.

In: a subject, a tier, a folder. Out: a `JudgedRun`, and verdict.json in that folder. The flow, a night, a
pair, a search and a node of a fleet differ in what they run and in what follows, never in how.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from stackcheck.engine.client import Engine
from stackcheck.files.atomic import write_atomically
from stackcheck.policy import Tier, is_enough
from stackcheck.suite import bounds, certifiable, expected, foreign, needed, requirements, run, sbom, verdict
from stackcheck.suite.last_run import CANNOT_CERTIFY
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.results import RunResult
from stackcheck.suite.run import RunPlan
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Status, Verdict
from stackcheck.vendors import seen


@dataclasses.dataclass(frozen=True, kw_only=True)
class JudgedRun:
    """A run of the suites and its verdict."""

    plan: RunPlan  # what ran, and on which host
    result: RunResult
    verdict: Verdict  # PASSED, FAILED or UNFIT, with reasons
    folder: Path  # `build/<name>/`, with the log of the run
    reused: bool  # whether the result is of an earlier run, because nothing has changed since
    record: str | None = None  # digest of the run's record in the history; None if it is not kept

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
    case_seed: int = 0,
    carried: frozenset[str] = frozenset(),
) -> JudgedRun:
    """Run the suites, or take the earlier result of the same plan in `out` (`reuse`); then judge it.

    `carried` has the ids of the checks that need not run: the certificate of the image below vouches for
    them. `case_seed` draws the generated cases; it is 0 for a first certificate.

    Raises:
        ChecksFailedError: The run has no valid result, or an image from elsewhere lacks what the suites need.
    """
    plan = run.plan(subject, tier=tier, root=root, out=out, case_seed=case_seed)
    required = dataclasses.replace(requirements.of(subject, plan.host, tier, root), carried=carried)
    if carried:
        plan = dataclasses.replace(plan, only=expected.expression(set(required.checks) - carried))
    for reason in certifiable.before_a_run(subject, plan.host, tier, root):
        report(f"{subject.name}: this run cannot end PASSED: {reason}")
    earlier = run.earlier_result(plan, out)
    kept = earlier if earlier and reuse(earlier) else None
    if kept:
        report(f"{subject.name}: not run again: same image, suites, thresholds and host")
    if subject.stack is None:
        packages = sbom.load_or_create(subject.image, engine, out, report, accepted=subject.accepted_python)
        required = dataclasses.replace(required, known_issues=foreign.issues(packages, plan.host, root))
        for issue in required.known_issues:
            report(f"{subject.name}: known issue {issue.id}: {issue.symptom} ({issue.issue}; {issue.fix})")
        if kept is None:
            needed.require(packages, subject, engine)
    result = kept or measure(plan, engine, out=out, report=report, only=plan.only)
    found = judge(result, dataclasses.replace(required, seen=seen.look(plan.host, run.busy_s(out))), root)
    _write(found, out)
    _announce(plan, result, found, report)
    return JudgedRun(plan=plan, result=result, verdict=found, folder=out, reused=kept is not None)


def measure(
    plan: RunPlan, engine: Engine, *, out: Path, report: Callable[[str], None], only: str | None = None
) -> RunResult:
    """Run a plan without a verdict; `only` selects checks (pytest's -k).

    Raises:
        ChecksFailedError: The run has no valid result.
    """
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
