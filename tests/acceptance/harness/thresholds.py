"""The bounds of metrics. In: thresholds/<vendor>/<device-model>.json. Out: the bound of one metric, or
problems.

An entry has metric, conditions, bound, unit, direction ("min" or "max"), ceiling, source and tolerance. It
applies if each of its conditions equals the metric's; of several entries the one with the most conditions
wins. There is no default, no slack and no expression. Figures that others published and no check measures are
in published/, which nothing reads.
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from vendors import VendorName
from workloads import speed_conditions

FOLDER = Path(__file__).resolve().parent.parent / "thresholds"
KEYS = {"metric", "conditions", "bound", "unit", "direction", "ceiling", "source", "tolerance"}
PLACEHOLDERS = ("todo", "tbd", "fixme", "xxx", "placeholder", "coming soon", "?")
LOWEST_SHARE, HIGHEST_SHARE = 0.30, 1.00

# What this project measures: unit, direction, and the conditions that may select a bound. An entry for
# anything else can never apply. "devices" is how many the check leases, "size" a model's name in
# trainers/presets.py.
METRICS: Mapping[str, tuple[str, Literal["min", "max"], frozenset[str]]] = {
    "gemm_tflops": ("TFLOP/s", "min", frozenset({"dtype", "m", "n", "k", "layout"})),
    "copy_gb_per_s": ("GB/s", "min", frozenset({"bytes", "kind"})),
    "attention_forward_tflops": (
        "TFLOP/s",
        "min",
        frozenset({"dtype", "backend", "causal", "sequence", "shape"}),
    ),
    "attention_backward_tflops": (
        "TFLOP/s",
        "min",
        frozenset({"dtype", "backend", "causal", "sequence", "shape"}),
    ),
    "all_reduce_busbw": ("GB/s", "min", frozenset({"bytes", "dtype", "nvls", "devices"})),
    "all_gather_busbw": ("GB/s", "min", frozenset({"bytes", "dtype", "nvls", "devices"})),
    "reduce_scatter_busbw": ("GB/s", "min", frozenset({"bytes", "dtype", "nvls", "devices"})),
    "all_to_all_busbw": ("GB/s", "min", frozenset({"bytes", "dtype", "nvls", "devices"})),
    "all_reduce_latency_us": ("us", "max", frozenset({"bytes", "dtype", "nvls", "devices", "graph"})),
    "all_gather_latency_us": ("us", "max", frozenset({"bytes", "dtype", "nvls", "devices", "graph"})),
    "reduce_scatter_latency_us": ("us", "max", frozenset({"bytes", "dtype", "nvls", "devices", "graph"})),
    "all_to_all_latency_us": ("us", "max", frozenset({"bytes", "dtype", "nvls", "devices", "graph"})),
    "p2p_gb_per_s": ("GB/s", "min", frozenset({"bytes", "devices"})),
    "h2d_gb_per_s": ("GB/s", "min", frozenset({"bytes"})),
    "d2h_gb_per_s": ("GB/s", "min", frozenset({"bytes"})),
    "train_tokens_per_s_per_gpu": (
        "tokens/s",
        "min",
        frozenset({"model", "size", "precision", "seq", "devices", "batch", "micro_batch"}),
    ),
    "train_fsdp2_tokens_per_s_per_gpu": (
        "tokens/s",
        "min",
        frozenset({"model", "size", "layers", "precision", "seq", "devices", "batch", "micro_batch"}),
    ),
}


class ThresholdError(Exception):
    """A thresholds file is invalid; the message has one line per problem."""


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """One entry of a file."""

    metric: str
    bound: float
    unit: str
    direction: Literal["min", "max"]
    ceiling: float
    source: str
    tolerance: str
    conditions: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    def holds_for(self, metric: str, conditions: Mapping[str, Any]) -> bool:
        """Whether this entry applies to a measurement with these conditions."""
        return metric == self.metric and all(
            key in conditions and conditions[key] == value for key, value in self.conditions.items()
        )

    def accepts(self, value: float) -> bool:
        """Whether the value satisfies the bound; NaN never does."""
        return value >= self.bound if self.direction == "min" else value <= self.bound


def path_of(vendor: VendorName, model: str) -> Path:
    """The thresholds file of a device model."""
    return FOLDER / vendor / f"{model}.json"


@functools.cache
def load(path: Path) -> tuple[Threshold, ...]:
    """The entries of a file; none if it does not exist. Raises `ThresholdError`."""
    if not path.exists():
        return ()
    entries = json.loads(path.read_text(encoding="utf-8"))["thresholds"]
    problems = list(lint(entries))
    if problems:
        raise ThresholdError(f"{path}:\n" + "\n".join(problems))
    return tuple(Threshold(**entry, file=str(path.relative_to(FOLDER.parent))) for entry in entries)


def find(entries: Iterable[Threshold], metric: str, conditions: Mapping[str, Any]) -> Threshold | None:
    """The entry with the most conditions that applies to a measurement."""
    fitting = [entry for entry in entries if entry.holds_for(metric, conditions)]
    return max(fitting, key=lambda entry: len(entry.conditions), default=None)


def lint(entries: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Every problem in a file's entries, one line each."""
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries, start=1):
        label = f"entry {number} ({entry.get('metric', 'no metric')})"
        yield from (f"{label}: {problem}" for problem in _problems(entry))
        key = json.dumps([entry.get("metric"), entry.get("conditions")], sort_keys=True)
        if key in seen:
            yield f"{label}: unreachable, entry {seen[key]} has the same metric and conditions"
        seen[key] = number


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    missing = sorted(key for key in KEYS if entry.get(key) in (None, ""))
    if missing or set(entry) - KEYS:
        yield f"missing {missing}, unknown {sorted(set(entry) - KEYS)}"
        return
    yield from _key_problems(entry)
    yield from _number_problems(entry)
    for key in ("source", "tolerance"):
        text = str(entry[key]).strip()
        if len(text) < 12 or any(word in text.lower() for word in PLACEHOLDERS):
            yield f"{key} is a placeholder: {text!r}"


def _key_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    if entry["metric"] not in METRICS:
        yield f"unreachable: no check records {entry['metric']}"
        return
    unit, direction, conditions = METRICS[entry["metric"]]
    if entry["unit"] != unit:
        yield f"unit {entry['unit']!r}, expected {unit!r}"
    if entry["direction"] != direction:
        yield f"wrong direction {entry['direction']!r}, expected {direction!r}"
    unknown = sorted(set(entry["conditions"]) - conditions)
    if unknown:
        yield f"unreachable: no check records this metric with {unknown}"
    elif not speed_conditions.reaches(entry["metric"], entry["conditions"]):
        yield f"unreachable: no check measures it with {entry['conditions']}; keep it in published/"


def _number_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    bound, ceiling = entry["bound"], entry["ceiling"]
    for key, value in (("bound", bound), ("ceiling", ceiling)):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or value <= 0
        ):
            yield f"{key} {value!r} is no finite positive number"
            return
    share = bound / ceiling if entry["direction"] == "min" else ceiling / bound
    if not LOWEST_SHARE <= share <= HIGHEST_SHARE:
        yield f"bound {bound:g} is {share:.0%} of its ceiling {ceiling:g}, expected 30 % to 100 %"
