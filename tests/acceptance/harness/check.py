"""The state of one check. In: calls of the fixtures.
Out: metrics with verdicts, evidence, and how it ends.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from harness import resultfile, thresholds
from harness.unfit import Unfit, invalid
from vendors import Sample, VendorName, is_known

NO_BOUND_ON_CPU = "none: a cpu run proves the flow and the numerics, never the speed of a GPU"
MetricVerdict = Literal["pass", "fail", "recorded", "no_threshold"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One measurement and its verdict by the bound."""

    name: str
    value: float | None
    unit: str
    repeats: tuple[float | None, ...]
    conditions: Mapping[str, Any]
    direction: Literal["min", "max"] | None = None
    bound: float | None = None
    ceiling: float | None = None
    source: str | None = None
    verdict: MetricVerdict = "recorded"


@dataclass
class Check:
    """The state of the check that is running."""

    vendor: VendorName
    model: str
    devices: tuple[str, ...] = ()
    count: int = 1
    bounds_needed: bool = True  # the gate compares with the node's own past where a model has no bound
    metrics: list[Metric] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)  # the violations that are figures below their bounds
    unfit: list[Unfit] = field(default_factory=list)
    doubts: list[Unfit] = field(default_factory=list)  # states that explain a slow figure, and nothing else
    machine: tuple[Unfit, ...] = ()  # what ended the check as invalid
    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    more_evidence: dict[str, Any] = field(default_factory=dict)  # by name, beside the devices' state
    skip: dict[str, Any] | None = None  # kind and facts, if the check was skipped
    hints: tuple[str, ...] = ()  # causes that the host shows, printed if the check fails
    # Why it failed, if missing or violated bounds or the clock alone did it, or an exception of the suites'
    # own, which judges nothing.
    cause: Literal["no_threshold", "bound", "exception", "time_limit"] | None = None
    started: str = field(default_factory=resultfile.now)
    waited_s: float = 0.0  # for devices, or for other checks to end

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time of this block as waiting, not as work of the check."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited_s += time.monotonic() - began

    def record(
        self,
        name: str,
        value: float,
        *,
        unit: str,
        repeats: Sequence[float] = (),
        conditions: Mapping[str, Any] | None = None,
        gate: bool = False,
        bound_needed: bool = True,
    ) -> None:
        """Record a metric. With `gate`, a missing or violated bound fails the check at its end.

        Args:
            name: One of `thresholds.METRICS` if the metric is gated.
            value: The measurement, usually the median of `repeats`.
            unit: The unit of value and repeats; it must equal the bound's.
            repeats: The single measurements.
            conditions: What selects the bound; the number of devices is added.
            gate: Whether the bound judges the check.
            bound_needed: Whether a missing bound is a failure. If not, the source says how to add one.
        """
        given = {"devices": self.count, **(conditions or {})}
        entry = thresholds.find(thresholds.load(thresholds.path_of(self.vendor, self.model)), name, given)
        if entry is not None and entry.unit != unit:
            raise ValueError(f"{name} is recorded in {unit!r} and its threshold is in {entry.unit!r}")
        gate = gate and (entry is not None or self.bounds_needed)
        verdict, problem = self._verdict(name, value, unit, given, entry, gate=gate)
        source = NO_BOUND_ON_CPU if gate and self.vendor == "cpu" else None
        source = f"{entry.file}: {entry.source}" if entry else source
        if verdict == "no_threshold" and not bound_needed:
            source = problem
        elif problem is not None:
            self.violations.append(problem)
            if verdict == "fail" and math.isfinite(value):
                self.slow.append(problem)
        self.metrics.append(
            Metric(
                name=name,
                value=finite(value),
                unit=unit,
                repeats=tuple(finite(repeat) for repeat in repeats),
                conditions=given,
                direction=entry.direction if entry else None,
                bound=entry.bound if entry else None,
                ceiling=entry.ceiling if entry else None,
                source=source,
                verdict=verdict,
            )
        )

    def conclude(self) -> None:
        """Raise what the check's own assertions did not see: first an unfit machine, then violated bounds.

        A slow figure on a machine that explains it (another process, a lowered power cap) is invalid; with
        clean telemetry it is a failure.
        """
        if self.unfit:
            invalid(self.unfit)
        if self.doubts and self.violations and self.violations == self.slow:
            invalid(self.doubts, "\n".join(self.slow))
        if self.violations:
            if self.lacks_only_bounds():
                self.cause = "no_threshold"
            elif self.violations == self.slow:
                self.cause = "bound"
            pytest.fail("\n".join(self.violations), pytrace=False)

    def require_even(self, uneven: Sequence[str]) -> None:
        """Refuse devices or pairs that are slower than others: invalid where the machine explains it."""
        if uneven and self.doubts and self.violations == self.slow:
            invalid(self.doubts, "\n".join(uneven))
        assert not uneven, "\n".join(uneven)

    def lacks_only_bounds(self) -> bool:
        """Whether bounds are missing but none is violated, so that nothing is known to be slow."""
        verdicts = {metric.verdict for metric in self.metrics}
        return "no_threshold" in verdicts and "fail" not in verdicts

    def telemetry(self) -> dict[str, Any]:
        """Statistics of the samples that were taken while a performance check ran."""
        clocks = [float(sample.clock_mhz) for sample in self.samples if is_known(sample.clock_mhz)]
        watts = [float(sample.power_w) for sample in self.samples if is_known(sample.power_w)]
        degrees = [float(s.temperature_c) for s in self.samples if is_known(s.temperature_c)]
        held = [sample.throttle for sample in self.samples]
        reasons = sorted({reason for throttle in held for reason in (*throttle.unfit, *throttle.normal)})
        return {
            "samples": len(self.samples),
            "clock_mhz_median": statistics.median(clocks) if clocks else None,
            "clock_mhz_min": min(clocks, default=None),
            "power_w_median": statistics.median(watts) if watts else None,
            "power_w_max": max(watts, default=None),
            "temperature_c_median": statistics.median(degrees) if degrees else None,
            "temperature_c_max": max(degrees, default=None),
            "throttle": reasons,
            "unfit": {
                str(index): sorted(
                    {why for s in self.samples if s.index == index for why in s.throttle.unfit}
                )
                for index in sorted({sample.index for sample in self.samples})
            },
        }

    def _verdict(
        self,
        name: str,
        value: float,
        unit: str,
        conditions: Mapping[str, Any],
        entry: thresholds.Threshold | None,
        *,
        gate: bool,
    ) -> tuple[MetricVerdict, str | None]:
        """The verdict by the bound, and in words what is wrong."""
        where = f"{self.model} x{self.count}"
        words = ", ".join(f"{key}={value}" for key, value in conditions.items())
        if not math.isfinite(value):
            return "fail", f"{name} is {value} {unit} on {where}: not a number, which never passes"
        if not gate:
            return "recorded", None
        if entry is not None:
            if entry.accepts(value):
                return "pass", None
            sign = "<" if entry.direction == "min" else ">"
            share = f"{value / entry.ceiling:.0%} of the ceiling {entry.ceiling:g}"
            return "fail", (
                f"{name} {value:.4g} {entry.unit} {sign} {entry.bound:g} {entry.unit} on {where} ({share})\n"
                f"  with {words}\n  bound from {entry.file}: {entry.source}"
            )
        if self.vendor == "cpu":
            return "recorded", None
        path = thresholds.path_of(self.vendor, self.model).relative_to(thresholds.FOLDER.parent)
        return "no_threshold", (
            f"{name} {value:.4g} {unit} has no bound for {words} on {self.model}: add an entry to "
            f"{path} (stackcheck baseline proposes one)"
        )


def finite(value: float) -> float | None:
    """The value for JSON: null where it is not a number."""
    return value if math.isfinite(value) else None
