"""Propose thresholds of a device model from healthy runs. In: results. Out: a `Baseline`: proposed entries.

A bound is the median over the runs minus the larger of 5 % and three robust spreads; plus, where less is
better. The robust spread is 1.4826 x the median absolute deviation: the standard deviation of a normal
distribution. The runs must differ by chance alone (`comparable`). One run alone shows no spread, so its
bounds keep a wider margin (`ONE_RUN_MARGIN`). `thresholds.write` writes the proposals.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.history import regressions
from stackcheck.proof import thresholds
from stackcheck.proof.comparable import require_comparable, require_healthy
from stackcheck.suite import guesses
from stackcheck.suite.bounds import NOTHING_GATED, look_up
from stackcheck.suite.results import Metric, RunResult

LEAST_MARGIN = 0.05
SPREADS = 3
# Of one run: more than healthy H200s differ, which is 4.7 % in what the chip decides and 11.7 % in what the
# host decides too (docs/results/suites-h100.md).
ONE_RUN_MARGIN, ONE_RUN_MARGIN_WITH_HOST = 0.10, 0.15
WITH_HOST = ("h2d_", "d2h_", "train_")

Change = Literal["new", "tighter", "looser", "same"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """One proposed entry."""

    entry: thresholds.Entry  # the proposed threshold
    values: tuple[float, ...]  # what the runs measured, in the metric's unit
    median: float
    spread: float  # their robust spread, as a share of the median
    now: thresholds.Entry | None  # the entry that applies now, if there is one

    @property
    def times_beyond(self) -> float:
        """How many times the median is beyond the bound that applies now; 0 without one."""
        return guesses.times_beyond(self.median, self.now.bound, self.now.direction) if self.now else 0.0

    def label(self) -> str:
        """The metric and what selects its bound."""
        return label(self.entry.metric, self.entry.conditions)

    @property
    def change(self) -> Change:
        """How the proposed bound compares with the one that applies now."""
        if self.now is None:
            return "new"
        if self.entry.bound == self.now.bound:
            return "same"
        return (
            "tighter" if (self.entry.bound > self.now.bound) == (self.entry.direction == "min") else "looser"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """What a number of runs propose; `left_out` are the figures without a proposal, with the reason."""

    vendor: str
    model: str
    runs: int
    proposals: tuple[Proposal, ...]
    left_out: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Figure:
    """One measurement over all runs."""

    name: str
    conditions: thresholds.Conditions  # only those that select a bound
    metrics: tuple[Metric, ...]

    def label(self) -> str:
        return label(self.name, self.conditions)


def label(metric: str, conditions: thresholds.Conditions) -> str:
    """A metric and what selects its bound, in words."""
    return f"{metric} ({', '.join(f'{key}={value}' for key, value in conditions.items())})"


def propose(runs: Sequence[RunResult], *, root: Path, one_run: bool = False) -> Baseline:
    """Thresholds for the device model of some healthy runs of the same suites, stack and class of host.

    `one_run` takes a single run, with wider margins; its failed checks may not have measured a figure.

    Raises:
        ConfigurationError: Too few runs, one given twice, or runs that differ in more than chance.
        ChecksFailedError: A figure is too far beyond a derived bound to become one itself.
    """
    require_comparable(runs, *([1] if one_run else []))
    vendor, model = _model(runs[0])
    metrics = thresholds.ask_suites(root, model).metrics
    for run in runs:
        require_healthy(run, metrics if one_run else None, _guessed(run, root))
    figures, left_out = _figures(runs, metrics)
    rules = thresholds.ask_suites(root, model, figures=[(f.name, f.conditions) for f in figures])
    file = thresholds.load_thresholds(root, vendor, model)
    proposals = tuple(
        _proposal(figure, runs, rules, file.holding(figure.name, figure.conditions), physical)
        for figure, physical, reached in zip(figures, rules.ceilings, rules.reached, strict=True)
        if reached
    )
    # Refuse figures far beyond a derived bound: else a slow kernel would become its own measure.
    far = [
        f"{one.label()}: median {one.median:.4g} {one.entry.unit}, the derived bound is {one.now.bound:g}"
        for one in proposals
        if one.now and one.now.kind == "derived" and one.times_beyond > guesses.FAR
    ]
    if far:
        raise ChecksFailedError(
            "figures far beyond a derived bound cannot become the bound",
            got="\n    ".join(far),
            expected=f"at most {guesses.FAR:g} times beyond it: more is rather a fault than a wrong guess",
            next_step=guesses.OTHER_STACK,
        )
    unjudged = (figure for figure, reached in zip(figures, rules.reached, strict=True) if not reached)
    left_out += [f"{figure.label()}: these suites compare it with no bound" for figure in unjudged]
    return Baseline(vendor=vendor, model=model, runs=len(runs), proposals=proposals, left_out=tuple(left_out))


def _guessed(run: RunResult, root: Path) -> frozenset[str]:
    """The checks that failed derived bounds alone: to replace those is what a baseline is for."""
    doubted = [check for check in run.checks if check.cause == "bound"]
    found = look_up(run, root) if doubted else NOTHING_GATED
    return frozenset(check.id for check in doubted if guesses.below(check, found))


def margin(metric: str, values: Sequence[float]) -> tuple[float, float, float]:
    """(median, robust spread, margin of the bound); spread and margin are shares of the median."""
    median = statistics.median(values)
    if len(values) == 1:
        return median, 0.0, ONE_RUN_MARGIN_WITH_HOST if metric.startswith(WITH_HOST) else ONE_RUN_MARGIN
    spread = regressions.spread(values)
    return median, spread, max(LEAST_MARGIN, SPREADS * spread)


def _model(run: RunResult) -> tuple[str, str]:
    models = sorted({device.model for device in run.host.devices})
    if run.host.vendor == "cpu" or len(models) != 1:
        raise ConfigurationError(
            "there are no thresholds for such a host",
            where=f"run {run.run_id}",
            got=f"{run.host.vendor}: {', '.join(models) or 'no device'}",
            expected="GPUs of one model; a CPU run never proves a speed",
            next_step="run the suites on such a host: stackcheck test IMAGE --tier standard",
        )
    return run.host.vendor, models[0]


def _figures(
    runs: Sequence[RunResult], metrics: Mapping[str, thresholds.MetricRule]
) -> tuple[list[_Figure], list[str]]:
    """The figures that every run measured in the same way, and a line about each of the others."""
    found: dict[thresholds.Key, list[Metric]] = {}
    for run in runs:
        for metric in _judged(run, metrics):
            found.setdefault(_key(metric, metrics), []).append(metric)
    figures, left_out = [], []
    for (name, text), same in found.items():
        figure = _Figure(name=name, conditions=json.loads(text), metrics=tuple(same))
        problem = _problem(same, metrics[name], len(runs))
        if problem is None:
            figures.append(figure)
        else:
            left_out.append(f"{figure.label()}: {problem}")
    return figures, left_out


def _judged(run: RunResult, metrics: Mapping[str, thresholds.MetricRule]) -> Iterator[Metric]:
    """The metrics that have a bound or need one; the others are recorded for information only."""
    for check in run.checks:
        yield from (
            metric
            for metric in check.metrics
            if metric.name in metrics and (metric.bound is not None or metric.verdict == "no_threshold")
        )


def _key(metric: Metric, metrics: Mapping[str, thresholds.MetricRule]) -> thresholds.Key:
    chosen = (name for name in metric.conditions if name in metrics[metric.name].conditions)
    given = {name: metric.conditions[name] for name in chosen if metric.conditions[name] is not None}
    return metric.name, json.dumps(given)


def _problem(same: Sequence[Metric], rule: thresholds.MetricRule, runs: int) -> str | None:
    """Why these measurements cannot be a baseline; None if they can."""
    if len(same) != runs:
        return f"measured {len(same)} times in {runs} runs"
    if any(metric.value is None or metric.value <= 0 for metric in same):
        return "not a positive number in every run"
    if any(metric.unit != rule.unit for metric in same):
        return f"in a different unit than {rule.unit}"
    first = same[0].conditions
    differ = sorted({name for metric in same for name in first if metric.conditions.get(name) != first[name]})
    return f"measured under different conditions: {', '.join(differ)}" if differ else None


def _proposal(
    figure: _Figure,
    runs: Sequence[RunResult],
    rules: thresholds.Rules,
    now: thresholds.Entry | None,
    physical: float | None,
) -> Proposal:
    rule = rules.metrics[figure.name]
    values = tuple(metric.value for metric in figure.metrics if metric.value is not None)
    median, spread, share = margin(figure.name, values)
    bound = _rounded(median * (1 - share if rule.direction == "min" else 1 + share), rule.direction)
    ceiling, origin = _ceiling(bound, median, physical, now, rules)
    measured = f"median {median:.4g} {rule.unit}, robust spread {spread:.2%}, {origin}"
    if len(runs) == 1:
        measured = f"{median:.4g} {rule.unit}, spread between runs not known, {origin}"
    if now and now.kind == "derived" and guesses.times_beyond(median, now.bound, now.direction) > 1:
        measured += f"; beyond the derived bound {now.bound:g}, which was a guess"
    entry = thresholds.Entry(
        metric=figure.name,
        conditions=figure.conditions,
        bound=bound,
        unit=rule.unit,
        direction=rule.direction,
        ceiling=ceiling,
        source=_source(figure, runs, measured),
        tolerance=_tolerance(rule, share, len(runs)),
        kind="measured",
        basis={"runs": [run.run_id for run in runs]},
    )
    return Proposal(entry=entry, values=values, median=median, spread=spread, now=now)


def _tolerance(rule: thresholds.MetricRule, share: float, runs: int) -> str:
    sign = "minus" if rule.direction == "min" else "plus"
    if runs == 1:
        return f"one run {sign} {share:.1%}, which is more than healthy machines of one model differ"
    floor = "the smallest margin of a baseline" if share == LEAST_MARGIN else "three robust spreads"
    return f"median {sign} {share:.1%}, {floor}"


def _rounded(bound: float, direction: str) -> float:
    """The bound with four digits, rounded to the less strict side."""
    step = 10.0 ** (math.floor(math.log10(bound)) - 3)
    steps = math.floor(bound / step) if direction == "min" else math.ceil(bound / step)
    return float(f"{steps * step:.4g}")


def _ceiling(
    bound: float, median: float, physical: float | None, now: thresholds.Entry | None, rules: thresholds.Rules
) -> tuple[float, str]:
    """The ceiling of an entry and its origin: the hardware's, the one that applies now, or the median.

    The hardware's ceiling is taken even if the bound exceeds it: then the lint refuses the impossible figure.
    """
    if physical is not None and bound >= rules.lowest_share * physical:
        return physical, "ceiling of devices.json"
    if now is not None:
        share = bound / now.ceiling if now.direction == "min" else now.ceiling / bound
        if rules.lowest_share <= share <= 1:
            return now.ceiling, "ceiling of the present entry"
    return float(f"{median:.4g}"), "which is its own ceiling, for lack of a closer one"


def _source(figure: _Figure, runs: Sequence[RunResult], measured: str) -> str:
    """When, where, with what and how often it was measured: enough to judge the bound without the runs."""
    run = runs[0]
    first, last = min(r.started for r in runs).date(), max(r.started for r in runs).date()
    when = f"{first}" if first == last else f"{first} to {last}"
    hosts = len({tuple(sorted(d.id for d in r.host.devices)) for r in runs})
    device = run.host.devices[0]
    host = [f"{device.power_cap_w:g} W" if device.power_cap_w else "", f"driver {run.host.driver}"]
    host += [
        f"NVLS {run.host.nvls}" if run.host.nvls else "",
        f"partition {run.host.partition}" if run.host.partition else "",
    ]
    image = run.image.config_digest[:19] if run.image else "no image"
    stack = f"torch {run.software.get('torch')}, stack {run.stack_id or 'undeclared'} ({image})"
    repeats = len(figure.metrics[0].repeats)
    return (
        f"measured {when} on {len(run.host.devices)} x {device.model} of {hosts} host{'s'[: hosts > 1]}"
        f" ({', '.join(filter(None, host))}), {stack}, suites {run.inputs.suites[:19]}, {run.tier} tier,"
        f" n = {len(runs)} run{'s'[: len(runs) > 1]} of {repeats} repeats: {measured}"
    )
