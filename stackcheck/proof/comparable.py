"""Runs that count together. In: results. Out: nothing, or the error that says what tells them apart.

A baseline is of one class of host, one stack, one set of suites and one environment, and of runs in which
nothing failed: what failed may also have been slow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stackcheck.suite.results import CheckResult, RunResult

FEWEST_RUNS = 3  # of two runs nobody can say which one is the outlier
NO_BOUND = " has no bound for "  # how the suites begin to say that an entry is missing


def require_comparable(runs: Sequence[RunResult]) -> None:
    """Refuse too few runs, one given twice, and runs that differ in more than chance.

    Raises:
        ConfigurationError: With the first difference.
    """
    if len(runs) < FEWEST_RUNS:
        raise ConfigurationError(
            "too few runs to tell an outlier from a figure",
            got=f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
            expected=f"at least {FEWEST_RUNS} healthy runs of the same suites on the same class of host",
            next_step="run the suites again: stackcheck test IMAGE --tier standard",
        )
    if len({run.run_id for run in runs}) < len(runs):
        raise ConfigurationError("one run was given twice, and proves nothing the second time")
    first, *others = ({**_host_class(run), **_stack(run), **_conditions(run)} for run in runs)
    for number, other in enumerate(others, start=2):
        for name, value in first.items():
            if other[name] != value:
                raise ConfigurationError(
                    f"runs 1 and {number} differ in {name}, so their figures do not belong together",
                    got=str(other[name]),
                    expected=str(value),
                    next_step="give runs of one host class, one stack and one set of suites",
                )


def _host_class(run: RunResult) -> dict[str, object]:
    """What makes two machines the same for a bound; their ids, kernels and firmware may differ."""
    host = run.host
    devices = sorted((d.model, d.arch, d.memory_bytes, d.power_cap_w or 0.0) for d in host.devices)
    facts = {"driver": host.driver, "partition": host.partition, "NVLS": host.nvls}
    return {"vendor": host.vendor, "devices": devices, **facts}


def _stack(run: RunResult) -> dict[str, object]:
    image = run.image.config_digest if run.image else None
    return {"stack": run.stack_id, "image": image, "software": dict(sorted(run.software.items()))}


def _conditions(run: RunResult) -> dict[str, object]:
    given = {"suites": run.inputs.suites, "trainers": run.inputs.trainers, "tier": run.tier}
    return {**given, "environment": dict(sorted(run.environment.items()))}


def require_healthy(run: RunResult) -> None:
    """Refuse a run that says nothing about what a healthy machine reaches.

    Raises:
        ChecksFailedError: It did not end, or a check failed for another reason than a missing bound.
        MachineUnfitError: A check was invalid: the machine was throttled, shared or unfit.
    """
    if run.state != "finished":
        raise ChecksFailedError("a run that did not end is no baseline", where=run.run_id, got=run.state)
    for check in run.checks:
        if check.outcome == "invalid":
            raise MachineUnfitError(
                "the machine was unfit during this run", where=f"{run.run_id} {check.id}", got=check.reason
            )
        if check.outcome in ("failed", "error") and not _lacks_only_bounds(check):
            raise ChecksFailedError(
                "a run with a failed check is no baseline: what failed may also have been slow",
                where=f"{run.run_id} {check.id}",
                got=check.reason,
                expected="no failure but a missing bound",
            )


def _lacks_only_bounds(check: CheckResult) -> bool:
    """A new figure fails for want of a bound; to propose that bound is what this is for."""
    missing = sum(metric.verdict == "no_threshold" for metric in check.metrics)
    failed = any(metric.verdict == "fail" for metric in check.metrics)
    lines = (check.reason or "").splitlines()
    return not failed and missing == len(lines) > 0 and all(NO_BOUND in line for line in lines)
