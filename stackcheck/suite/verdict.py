"""Judge a run. In: a `RunResult` and the required checks. Out: PASSED, FAILED or UNFIT, with reasons. Pure.

The verdict is monotonic: PASSED needs evidence, and losing a result or adding a failure never turns another
verdict into PASSED (https://github.com/in-toto/attestation/blob/main/docs/validation.md).

UNFIT means: this run says nothing about the image, run it on a different machine. FAILED comes before UNFIT:
a check that really failed says something about the image, and UNFIT would hide it. So a check that can fail
because the machine was throttled has to report `invalid` itself, and its telemetry has to show the state of
the machine that it names: `invalid` without such evidence is FAILED. Only what this host itself sees comes
before FAILED: where it has lost a device during the run, nothing that failed says anything. A machine that
cannot certify the stack is unfit too (`certifiable`): what passed on 4 devices says nothing about 8. So is
one whose figure is beyond a bound that is only a guess, or whose time is (`guesses`).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from stackcheck.errors import ChecksFailedError, MachineUnfitError, StackcheckError
from stackcheck.matrix.known_issues import KnownIssue
from stackcheck.policy import Tier, Waiver, is_advisory, is_enough
from stackcheck.suite import certifiable, expected, figures, guesses, machine, skips
from stackcheck.suite.bounds import DRIVER, NOTHING_GATED, Bounds
from stackcheck.suite.certifiable import MISSING
from stackcheck.suite.figures import NO_BOUND, accepts, flaw, lacks_bound
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.results import CheckResult, RunResult

Status = Literal["PASSED", "FAILED", "UNFIT"]
SPEED: Tier = "standard"  # the first tier that measures speed
UNBOUNDED = "no bound:"  # begins the reason of a check whose figures have no bound
SHOWN_REASONS = 8  # of a verdict, in an error message
SHOWN_LINES = 4  # of a reason there; a workload that died tells of each rank
MADE_UP = "the result is made up by a test: no device ran its checks"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run says about an image.

    Attributes:
        unbounded: Ids of those `failed` checks whose only fault is that a figure has no bound on this model.
        guessed: Ids of the checks whose only fault is beyond a guess: a derived bound, or a limit of time.
        bounds: Class of the bounds that judged the figures (measured, published, …) -> how many.
        driver: What the documents say about the host's driver: its state and a sentence; empty for a CPU.
        clock: What this host's clock and the devices' own counters say about the speed; empty for a CPU.
        only_bounds: The same of missing and derived bounds that are not far away: measure this machine's own.
        baselines: The stack's best certified figures, which held this run beside the bounds.
    """

    status: Status  # PASSED, FAILED (the image failed, or the evidence is incomplete), or UNFIT (the machine)
    reasons: tuple[str, ...]  # why it is not PASSED; empty if it is
    passed: tuple[str, ...]  # ids of the checks that passed
    failed: tuple[str, ...]  # ids of the checks that failed or ended with an error
    skipped: tuple[str, ...]  # ids of the checks that were skipped
    invalid: tuple[str, ...]  # ids of the checks that found the machine unfit
    warned: tuple[str, ...]  # ids of the checks that a waiver accepts
    required: tuple[str, ...]  # the ids of the checks that had to pass
    waivers: tuple[Waiver, ...] = ()
    unbounded: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    lacks_only_bounds: bool = False  # whether missing bounds are all that keeps the run from PASSED
    only_bounds: bool = False
    known_issues: tuple[KnownIssue, ...] = ()  # the reported faults of the versions in the image
    checks_digest: str = ""  # digest of the ids that this checkout's suites have, the advisory ones included
    bounds: Mapping[str, int] = field(default_factory=dict)
    driver: Mapping[str, str] = field(default_factory=dict)
    clock: str = ""
    baselines: tuple[Mapping[str, Any], ...] = ()

    def words(self, checks: int) -> str:
        """How many checks ended in which way, as a line of progress."""
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"{self.status}, {len(self.passed)} of {checks} checks passed{skipped}"

    def as_json(self) -> dict[str, Any]:
        """The verdict as `verdict.json` has it."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return fields | {
            "waivers": [waiver.model_dump(mode="json") for waiver in self.waivers],
            "known_issues": [issue.as_json() for issue in self.known_issues],
        }


def judge(result: RunResult, required: Requirements, bounds: Bounds = NOTHING_GATED) -> Verdict:
    """Judge one run.

    A check that is missing or invalid cannot be waived: for the first change the suites, for the second the
    machine. `bounds` are those of the run's gated metrics, looked up on this host.
    """
    warned = tuple(
        check.id
        for check in result.checks
        if _waived(check, required.waivers) and _needs_waiver(check, required.facts)
    )
    names = {*required.checks, *(check.id for check in result.checks)}
    advisory = {name for name in names if is_advisory(name, required.advisory)}
    accepted = {*warned, *advisory}
    low = guesses.find(result.checks, bounds, same=required.same_thresholds)
    guessed = {name: guess for name, guess in low.items() if name not in accepted}
    failures = (
        *_about_the_run(result, required),
        *_about_the_set(result, required),
        *_about_checks(result, required, accepted | low.keys()),
        *_about_bounds(result, required, bounds, accepted, low),
        *figures.clock_problems(result, required.seen, bounds.ceilings),
        *_about_the_driver(result, bounds),
        *_about_known_issues(required),
    )
    against = _about_the_machine(result, required, bounds)
    unfit = (
        *against,
        *(_line(check) for check in result.checks if _is_unfit(check, required)),
        *(guess.reason for guess in guessed.values()),
    )
    unbounded = {check.id: _line(check) for check in result.checks if lacks_bound(check)}
    lost = tuple(
        f"device {name} was there when the run began, and this host has lost it"
        for name in (required.seen.gone if required.seen else ())
    )
    reasons = (*lost, *failures, *unfit)
    to_measure = (guess.reason for guess in guessed.values() if guess.measurable)
    of_bounds = {*unbounded.values(), *to_measure, *(one for one in against if MISSING in one)}
    return Verdict(
        status="UNFIT" if lost else "FAILED" if failures else "UNFIT" if unfit else "PASSED",
        reasons=reasons,
        passed=_ids(result, "passed"),
        failed=_ids(result, "failed", "error"),
        skipped=_ids(result, "skipped"),
        invalid=_ids(result, "invalid"),
        warned=warned,
        required=tuple(name for name in required.checks if name not in advisory),
        waivers=required.waivers,
        unbounded=tuple(unbounded),
        guessed=tuple(guessed),
        bounds=bounds.classes(),
        driver=bounds.driver.model_dump() if bounds.driver else {},
        clock=figures.clock_words(result, required.seen),
        checks_digest=expected.digest(tuple(sorted(required.checks))),
        known_issues=required.known_issues,
        lacks_only_bounds=bool(unbounded) and of_bounds.issuperset(failures),
        only_bounds=bool(reasons) and of_bounds.issuperset(reasons),
    )


def _about_the_machine(result: RunResult, required: Requirements, bounds: Bounds) -> tuple[str, ...]:
    against = certifiable.reasons_against(
        (device.model for device in result.host.devices),
        machines=required.machines,
        archs=required.facts.archs,
        missing=bounds.missing,
    )
    return tuple(against)


def refusal(judged: Verdict, folder: Path) -> StackcheckError:
    """The error of a verdict that is not PASSED: the first reasons, and where to find all of them."""
    hidden = len(judged.reasons) - SHOWN_REASONS
    shown = [*map(_begin, judged.reasons[:SHOWN_REASONS]), *([f"… and {hidden} more"] if hidden > 0 else ())]
    wanted, next_step = "every required check passed", f"read {folder / 'container.log'}"
    if judged.only_bounds or judged.lacks_only_bounds:  # nothing is known to be slow
        wanted = "a measured bound for every gated figure on this device model"
        next_step = f"stackcheck baseline {folder / 'run' / 'result.json'} and the results of two more runs"
    elif judged.status == "UNFIT" and not judged.invalid:  # this machine cannot certify the stack
        wanted += ", on a machine that can certify the stack"
        next_step = "run the same command on such a machine, or measure its bounds: stackcheck baseline"
        if judged.guessed:
            wanted = "no figure and no time far beyond a guess"
            next_step = "take the step that each reason names last"
        if any("tested_on" in reason for reason in judged.reasons):
            next_step = (
                "run the same command on such a machine, or name this one under tested_on in matrix.yaml"
            )
    kind = MachineUnfitError if judged.status == "UNFIT" else ChecksFailedError
    return kind(
        f"the verdict is {judged.status}; nothing is published",
        got="\n    ".join(shown),
        expected=wanted,
        next_step=next_step,
    )


def _begin(reason: str) -> str:
    """The first lines of a reason."""
    lines = reason.splitlines()
    return "\n".join([*lines[:SHOWN_LINES], *(["…"] if len(lines) > SHOWN_LINES else ())])


def _about_the_driver(result: RunResult, bounds: Bounds) -> Iterator[str]:
    """The image judged the driver itself, but the lists of this checkout decide where it let one pass."""
    let_pass = (check for check in result.checks if check.outcome == "passed")
    measured = any(metric.name == DRIVER for check in let_pass for metric in check.metrics)
    if measured and bounds.driver and bounds.driver.state == "refused":
        yield bounds.driver.says


def _about_known_issues(required: Requirements) -> Iterator[str]:
    """What the matrix refuses is refused in an image from elsewhere too, whatever its checks say."""
    for issue in required.known_issues:
        if issue.severity == "refuse":
            yield f"{issue.id} ({issue.issue}; {issue.fix}): {issue.symptom}"


def _about_the_run(result: RunResult, required: Requirements) -> Iterator[str]:
    tested = result.image.config_digest if result.image else "no image"
    if tested != required.image_config_digest:
        yield f"the run tested {tested}, the image to certify is {required.image_config_digest}"
    if result.made_up and not required.made_up:
        yield MADE_UP
    if result.state != "finished":
        yield f"the run did not finish: its state is {result.state}"
    if required.vendor not in {None, result.host.vendor}:
        yield f"the stack is for {required.vendor}, the run was on vendor {result.host.vendor}"
    if result.host.vendor != "cpu" and not result.host.devices:
        yield f"vendor {result.host.vendor} was named and no {result.host.vendor.upper()} device is visible"
    yield from _about_devices(result, required)
    left_out = len(required.carried - {check.id for check in result.checks})
    if not result.checks:
        yield "the run has no results"
    selection, reported = result.selection, len(result.checks)
    if selection.dropped is None:
        yield "the result does not say how many checks of the tier were deselected"
    elif selection.dropped != left_out:
        arguments = " ".join(selection.arguments) or "none"
        yield f"{selection.dropped} checks of the tier were deselected; arguments: {arguments}"
    if reported < selection.collected:
        yield f"{selection.collected} checks were selected and {reported} reported: the run was cut short"


def _about_devices(result: RunResult, required: Requirements) -> Iterator[str]:
    """The devices of the result are those that this host sees: an image may hide some from its suites."""
    if required.devices is None:
        return
    reported = tuple(device.id for device in result.host.devices)
    if sorted(reported) != sorted(required.devices):
        yield f"the result is about {len(reported)} devices, this host sees {len(required.devices)} (by id)"
    seen = result.seen_devices
    if seen is not None and sorted(seen) != sorted(required.devices):  # None: a result of older suites
        yield f"the suites saw {len(seen)} devices, this host sees {len(required.devices)} (by id)"
    used = {name for check in result.checks for name in check.devices}
    if strangers := used - set(required.devices):
        yield f"checks used {len(strangers)} devices that this host does not have (by id)"


def _about_the_set(result: RunResult, required: Requirements) -> Iterator[str]:
    """The ids are exactly those that this checkout's suites have."""
    if not required.checks:
        yield "no check is required, so passing proves nothing"
    found = {check.id for check in result.checks}
    missing = set(required.checks) - found - required.carried
    yield from (f"{name}: no result" for name in required.checks if name in missing)
    unknown = sorted(found - set(required.checks))
    yield from (f"{name}: not a check of this checkout's suites" for name in unknown)
    if not any(check.outcome == "passed" for check in result.checks):
        yield "no check passed"


def _about_checks(result: RunResult, required: Requirements, apart: Collection[str]) -> Iterator[str]:
    for check in result.checks:
        if check.id not in apart:
            yield from _about_check(check, required)


def _about_check(check: CheckResult, required: Requirements) -> Iterator[str]:
    if check.outcome in {"failed", "error"}:
        yield _line(check)
    if check.outcome == "skipped" and (problem := skips.problem(check.skip, required.facts)):
        yield f"{_line(check)}; the skip is not accepted: {problem}"
    if check.outcome == "invalid" and (problem := machine.problem(check, required.facts.rows, required.seen)):
        yield f"{_line(check)}; {problem}"
    if check.outcome in {"failed", "error", "skipped"}:
        expired = [waiver for waiver in required.expired if waiver.covers(check.id)]
        yield from (f"{check.id}: its waiver ended on {waiver.until}" for waiver in expired)
    if check.outcome == "passed":
        yield from (f"{check.id}: {problem}" for metric in check.metrics if (problem := flaw(metric)))


def _about_bounds(
    result: RunResult, required: Requirements, bounds: Bounds, accepted: Collection[str], low: Collection[str]
) -> Iterator[str]:
    """The image reported a bound for each gated metric; the ones of this checkout decide."""
    for check in result.checks:
        if check.outcome != "passed" or check.id in accepted:
            continue
        for index, metric in enumerate(check.metrics):
            found = bounds.of.get((check.id, index))
            reported = (metric.bound, metric.direction)
            if problem := machine.slot_problem(metric.conditions, required.seen):
                yield f"{check.id}: {metric.name} {problem}"
            if found and required.same_thresholds and reported != (found.bound, found.direction):
                yield f"{check.id}: {metric.name} was judged by {reported}, this checkout has {found}"
            if found and check.id not in low and not accepts(found, metric):
                yield f"{check.id}: {metric.name} {metric.value} {metric.unit} violates {found}"
            # A gate holds a model without bounds to the past of its own node.
            if (check.id, index) in bounds.of and found is None and is_enough(result.tier, "smoke"):
                yield f"{check.id}: {NO_BOUND.format(metric.name)}"
    whole = all(check.outcome in {"passed", "skipped"} for check in result.checks)
    if whole and is_enough(result.tier, SPEED) and not required.carried:
        yield from (f"no check measured {name}, which has a bound" for name in bounds.unmeasured)
        yield from bounds.defaults


def _is_unfit(check: CheckResult, required: Requirements) -> bool:
    return check.outcome == "invalid" and machine.problem(check, required.facts.rows, required.seen) is None


def _waived(check: CheckResult, waivers: Sequence[Waiver]) -> bool:
    return any(waiver.covers(check.id) for waiver in waivers)


def _needs_waiver(check: CheckResult, facts: skips.Facts) -> bool:
    """Whether the check failed something that a waiver can accept; an invalid check has no such result."""
    if check.outcome == "passed":
        return any(flaw(metric) for metric in check.metrics)
    if check.outcome == "skipped":
        return skips.problem(check.skip, facts) is not None
    return check.outcome != "invalid"


def _line(check: CheckResult) -> str:
    if lacks_bound(check):
        missing = ", ".join(metric.name for metric in check.metrics if metric.verdict == "no_threshold")
        return f"{UNBOUNDED} {check.id}: {missing} on this device model; next: stackcheck baseline"
    return f"{check.id} {check.outcome}: {check.reason or 'no reason given'}"


def _ids(result: RunResult, *outcomes: str) -> tuple[str, ...]:
    return tuple(check.id for check in result.checks if check.outcome in outcomes)
