"""Which runs may count together for a baseline. In: results. Out: nothing, or an error with the difference.

A baseline is measured on one class of host, with one stack, one set of suites and one environment, by runs in
which nothing failed: a failed check may also have been slow.
"""

from collections import Counter
from collections.abc import Collection, Sequence

from stackcheck.errors import ChecksFailedError, ConfigurationError, MachineUnfitError
from stackcheck.suite.results import CheckResult, RunResult

FEWEST_RUNS = 3  # of two runs nobody can say which one is the outlier
RUN_AGAIN = "run the suites again: stackcheck test IMAGE --tier standard"


def require_comparable(runs: Sequence[RunResult], fewest: int = FEWEST_RUNS) -> None:
    """Refuse too few runs, a run given twice, and runs that differ in more than chance.

    Raises:
        ConfigurationError: With the first difference.
    """
    if len(runs) < fewest:
        raise ConfigurationError(
            "too few runs to tell an outlier from a typical figure",
            got=f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
            expected=f"at least {FEWEST_RUNS} healthy runs of the same suites on the same class of host",
            next_step=RUN_AGAIN,
        )
    doubled = [name for name, count in Counter(run.run_id for run in runs).items() if count > 1]
    if doubled:
        raise ConfigurationError(
            "one run was given twice",
            got=f"run id {', '.join(doubled)} in more than one file",
            expected="a result.json of its own for every run",
            next_step=RUN_AGAIN,
        )
    first, *others = ({**_host_class(run), **_stack(run), **_conditions(run)} for run in runs)
    for number, other in enumerate(others, start=2):
        for name, value in first.items():
            if other[name] != value:
                raise ConfigurationError(
                    f"runs 1 and {number} differ in {name}, so their figures cannot be compared",
                    got=str(other[name]),
                    expected=str(value),
                    next_step="give runs of one host class, one stack and one set of suites",
                )


def require_healthy(
    run: RunResult, figures: Collection[str] | None = None, guessed: Collection[str] = ()
) -> None:
    """Refuse a run that does not show what a healthy machine reaches.

    If metrics are named, a failed check matters only if it measured one of them. `guessed` has the ids of the
    checks that failed by derived bounds alone.

    Raises:
        ChecksFailedError: It is made up, did not finish, or a check failed for more than a missing bound.
        MachineUnfitError: A check was invalid: the machine was throttled, shared or unfit.
    """
    if run.made_up:
        raise ChecksFailedError(
            "a made-up result cannot be a baseline",
            where=f"run {run.run_id}",
            got="figures that no device measured",
            expected="a run of the suites",
            next_step=RUN_AGAIN,
        )
    if run.state != "finished":
        raise ChecksFailedError(
            "a run that did not finish cannot be a baseline",
            where=f"run {run.run_id}",
            got=f"state {run.state}",
            expected="state finished",
            next_step=RUN_AGAIN,
        )
    for check in run.checks:
        if check.outcome == "invalid":
            raise MachineUnfitError(
                "the machine was unfit during this run",
                where=f"run {run.run_id}, {check.id}",
                got=check.reason,
                expected="no check with the outcome invalid",
                next_step=f"wait until the machine is idle and healthy, then {RUN_AGAIN}",
            )
        measured = figures is None or any(metric.name in figures for metric in check.metrics)
        matters = measured and check.id not in guessed
        if check.outcome in ("failed", "error") and matters and not _lacks_only_bounds(check):
            raise ChecksFailedError(
                "a run with a failed check cannot be a baseline: a failed check may also have been slow",
                where=f"run {run.run_id}, {check.id}",
                got=check.reason,
                expected="no failure except a missing bound",
                next_step=f"fix the failure, then {RUN_AGAIN}",
            )


def _lacks_only_bounds(check: CheckResult) -> bool:
    """Whether missing bounds are all that failed: to propose them is what a baseline is for.

    The metrics have to agree with the stated cause, because the image under test wrote both.
    """
    verdicts = {metric.verdict for metric in check.metrics}
    stated = check.outcome == "failed" and check.cause == "no_threshold"
    return stated and "no_threshold" in verdicts and "fail" not in verdicts


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
    inputs = {"suites": run.inputs.suites, "trainers": run.inputs.trainers, "tier": run.tier}
    return {**inputs, "environment": dict(sorted(run.environment.items()))}
