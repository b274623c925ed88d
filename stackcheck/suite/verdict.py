"""Judge a run. In: a `RunResult` and the required checks. Out: PASSED, FAILED or UNFIT, with reasons. Pure.

The verdict is monotonic: PASSED needs evidence, and losing a result or adding a failure never turns another
verdict into PASSED (https://github.com/in-toto/attestation/blob/main/docs/validation.md).

UNFIT means: this run says nothing about the image, run it on a different machine. FAILED comes before UNFIT:
a check that really failed says something about the image, and UNFIT would hide it. So a check that can fail
because the machine was throttled has to report `invalid` itself. A machine that the stack does not name is
unfit too: what passed on 4 devices says nothing about 8.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Literal

from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from stackcheck.matrix.matrix import TestTarget
    from stackcheck.suite.results import CheckResult, Metric, RunResult

Status = Literal["PASSED", "FAILED", "UNFIT"]


@dataclass(frozen=True, kw_only=True)
class Waiver:
    """A named exception for one check. It is signed into the certificate, and the check stays visible.

    Args:
        check: A check id, or a function name, which covers its parametrized instances. No wildcards.
        reason: Why the check may fail, be skipped, or violate its threshold.
        by: The person who is responsible for it.

    Raises:
        ConfigurationError: A wildcard, or an empty check, reason or name.
    """

    check: str
    reason: str
    by: str

    def __post_init__(self) -> None:
        """Refuse a waiver that could cover several checks, or does not name a responsible person."""
        if not (self.check.strip() and self.reason.strip() and self.by.strip()):
            raise ConfigurationError(
                "a waiver is incomplete",
                got=f"check {self.check!r}, reason {self.reason!r}, by {self.by!r}",
                expected="a check, a reason and a person, none of them empty",
            )
        if re.search(r"[*?]", self.check):
            raise ConfigurationError(
                "a waiver covers one named check, not a pattern",
                got=self.check,
                expected="test_file.py::test_name or test_file.py::test_name[instance]",
            )


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a run says about an image.

    Args:
        status: PASSED, FAILED (the image failed, or the evidence is incomplete), or UNFIT (the machine).
        reasons: Why it is not PASSED; empty if it is.
        passed: Ids of the checks that passed.
        failed: Ids of the checks that failed or ended with an error.
        skipped: Ids of the checks that were skipped.
        invalid: Ids of the checks that found the machine unfit.
        warned: Ids of the checks that a waiver accepts.
        required: The required entries that were judged.
        waivers: The waivers that applied.
    """

    status: Status
    reasons: tuple[str, ...]
    passed: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]
    invalid: tuple[str, ...]
    warned: tuple[str, ...]
    required: tuple[str, ...]
    waivers: tuple[Waiver, ...] = ()


def judge(
    result: RunResult,
    required: Sequence[str],
    *,
    image_config_digest: str,
    machines: Sequence[TestTarget] | None,
    vendor: str | None = None,
    waivers: Sequence[Waiver] = (),
) -> Verdict:
    """Judge one run.

    Args:
        result: The run.
        required: Check names or patterns (`*`, `?`). Each needs at least one instance, and all must pass.
        image_config_digest: The config digest of the image that is to be certified.
        machines: The machines that the stack names (`tested_on`): a run on any other is UNFIT. None, for an
            image without a stack: every machine is accepted.
        vendor: The vendor of the stack; a run on a different vendor is FAILED. None: any vendor.
        waivers: Named exceptions for checks that ran. A check that is missing or invalid cannot be waived:
            for the first change the required set, for the second the machine.
    """
    warned = tuple(check.id for check in result.checks if _waived(check, waivers) and _needs_waiver(check))
    failures = (
        *_about_the_run(result, image_config_digest, vendor),
        *_about_required(result, required, warned),
        *_about_checks(result, warned),
    )
    unfit = (
        *machine_mismatch((device.model for device in result.host.devices), machines),
        *(_line(check) for check in result.checks if check.outcome == "invalid"),
    )
    return Verdict(
        status="FAILED" if failures else "UNFIT" if unfit else "PASSED",
        reasons=(*failures, *unfit),
        passed=_ids(result, "passed"),
        failed=_ids(result, "failed", "error"),
        skipped=_ids(result, "skipped"),
        invalid=_ids(result, "invalid"),
        warned=warned,
        required=tuple(required),
        waivers=tuple(waivers),
    )


def machine_mismatch(models: Iterable[str], machines: Sequence[TestTarget] | None) -> Iterator[str]:
    """Why a machine with devices of these models cannot certify a stack; nothing if it can.

    Additional devices make a different machine too, because bounds are per model and count.
    """
    if machines is None:
        return
    found = Counter(models)
    if any(found == Counter({machine.device: machine.count}) for machine in machines):
        return
    got = " and ".join(f"{model} x{count}" for model, count in sorted(found.items())) or "no device"
    named = " or ".join(f"{machine.device} x{machine.count}" for machine in machines) or "none"
    yield f"the machine has {got}, and the stack names {named} (tested_on in matrix.yaml)"


def matches(check_id: str, entry: str) -> bool:
    """Whether a required entry or a waiver covers a check: by its id, its function name, or a pattern.

    Only `*` and `?` are wildcards: brackets belong to pytest's parameters.
    """
    pattern = entry.replace("[", "[[]")
    return fnmatchcase(check_id, pattern) or fnmatchcase(check_id.partition("[")[0], pattern)


def _about_the_run(result: RunResult, image_config_digest: str, vendor: str | None) -> Iterator[str]:
    tested = result.image.config_digest if result.image else "no image"
    if tested != image_config_digest:
        yield f"the run tested {tested}, the image to certify is {image_config_digest}"
    if result.state != "finished":
        yield f"the run did not finish: its state is {result.state}"
    if vendor not in {None, result.host.vendor}:
        yield f"the stack is for {vendor}, the run was on vendor {result.host.vendor}"
    if result.host.vendor != "cpu" and not result.host.devices:
        yield f"vendor {result.host.vendor} was named and no {result.host.vendor.upper()} device is visible"
    yield from _about_counts(result)


def _about_counts(result: RunResult) -> Iterator[str]:
    if not result.checks:
        yield "the run has no results"
    selection, reported = result.selection, len(result.checks)
    if selection.dropped is None:
        yield "the result does not say how many checks of the tier were deselected"
    elif selection.dropped:
        arguments = " ".join(selection.arguments) or "none"
        yield f"{selection.dropped} checks of the tier were deselected; arguments: {arguments}"
    if reported < selection.collected:
        yield f"{selection.collected} checks were selected and {reported} reported: the run was cut short"


def _about_required(result: RunResult, required: Sequence[str], warned: Sequence[str]) -> Iterator[str]:
    if not required:
        yield "no required checks are named, so passing them proves nothing"
    passed = 0
    for entry in required:
        instances = [check for check in result.checks if matches(check.id, entry)]
        if not instances:
            yield f"required check {entry} has no result"
        for check in instances:
            passed += check.outcome == "passed" and check.id not in warned
            if check.id not in warned:
                yield from _about_required_check(check)
    if required and not passed:
        yield "no required check passed without a waiver"


def _about_required_check(check: CheckResult) -> Iterator[str]:
    if check.outcome == "skipped":
        yield _line(check)
    if check.outcome == "passed":
        for metric in check.metrics:
            if metric.value is None:
                yield f"{check.id}: required metric {metric.name} has no finite value"
            elif metric.verdict == "no_threshold":
                yield f"{check.id}: required metric {metric.name} has no threshold on this device"


def _about_checks(result: RunResult, warned: Sequence[str]) -> Iterator[str]:
    for check in result.checks:
        if check.id in warned:
            continue
        if check.outcome in {"failed", "error"}:
            yield _line(check)
        for metric in check.metrics:
            if check.outcome == "passed" and _violated(metric):
                yield (
                    f"{check.id}: {metric.name} {metric.value} {metric.unit} "
                    f"violates {metric.direction} {metric.bound}"
                )


def _violated(metric: Metric) -> bool:
    """Whether the metric violates its bound, by its verdict or by its numbers.

    The image under test wrote both, so neither is trusted alone.
    """
    if metric.verdict == "fail":
        return True
    if metric.value is None or metric.bound is None or metric.direction is None:
        return metric.verdict == "pass"  # a pass without a number or a bound has no evidence
    return metric.value < metric.bound if metric.direction == "min" else metric.value > metric.bound


def _waived(check: CheckResult, waivers: Sequence[Waiver]) -> bool:
    return any(matches(check.id, waiver.check) for waiver in waivers)


def _needs_waiver(check: CheckResult) -> bool:
    """Whether the check failed something that a waiver can accept; an invalid check has no such result."""
    if check.outcome == "passed":
        return any(_violated(m) or m.value is None or m.verdict == "no_threshold" for m in check.metrics)
    return check.outcome != "invalid"


def _line(check: CheckResult) -> str:
    return f"{check.id} {check.outcome}: {check.reason or 'no reason given'}"


def _ids(result: RunResult, *outcomes: str) -> tuple[str, ...]:
    return tuple(check.id for check in result.checks if check.outcome in outcomes)
