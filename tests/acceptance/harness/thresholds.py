"""The bounds of metrics. In: thresholds/<vendor>/<device-model>.json.
Out: the bound of one metric, or problems.

An entry has metric, conditions, bound, unit, direction ("min" or "max"), ceiling, source, tolerance, class
and basis. It applies if each of its conditions equals the metric's; of several entries the one with the most
conditions wins. There is no default, no slack and no expression. The class says where the bound comes from,
and the basis proves it:

measured   by this project: {"file": of docs/results} or {"runs": [run ids of results in docs/results]}
published  by others: {"method": how they measured, and why this suite must read the same}
derived    from a bound, a published figure or a datasheet: the numbers of `Derived`, written by a program
"""

import functools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from vendors import VendorName
from workloads import attention_default, speed_conditions

FOLDER = Path(__file__).resolve().parent.parent / "thresholds"
KEYS = {
    *("metric", "conditions", "bound", "unit", "direction", "ceiling", "source", "tolerance"),
    *("class", "basis"),
}
BoundClass = Literal["measured", "published", "derived"]
LEAST_TEXT = 12
# One way, by generation; PCI Express base specification. Every row of devices.json has 16 lanes.
PCIE_GB_PER_S_A_LANE = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
LANES = 16
HOST_COPIES = ("h2d_gb_per_s", "d2h_gb_per_s")
OLDER_SLOT = "pcie_generation"  # a condition of host copies, where the slot is older than the device
PLACEHOLDERS = ("todo", "tbd", "fixme", "xxx", "placeholder", "coming soon", "?")
LOWEST_SHARE, HIGHEST_SHARE = 0.30, 1.00
# A derived bound is at least this share of what its reference, or the best public figure, suggests.
LEAST_EXPECTED = 0.70
DIGITS = 4

# What this project measures: unit, direction, and the conditions that may select a bound. An entry for
# anything else can never apply. "devices" is how many the check leases, "size" a model's name in
# trainers/presets.py.
METRICS: Mapping[str, tuple[str, Literal["min", "max"], frozenset[str]]] = {
    "gemm_tflops": ("TFLOP/s", "min", frozenset({"dtype", "m", "n", "k", "layout"})),
    "copy_gb_per_s": ("GB/s", "min", frozenset({"bytes", "kind"})),
    **dict.fromkeys(
        ("attention_forward_tflops", "attention_backward_tflops"),
        ("TFLOP/s", "min", frozenset({"dtype", "backend", "causal", "sequence"})),
    ),
    **dict.fromkeys(
        (f"{op}_busbw" for op in speed_conditions.COLLECTIVES),
        ("GB/s", "min", frozenset({"bytes", "dtype", "nvls", "devices"})),
    ),
    **dict.fromkeys(
        (f"{op}_latency_us" for op in speed_conditions.COLLECTIVES),
        ("us", "max", frozenset({"bytes", "dtype", "nvls", "devices", "graph"})),
    ),
    "p2p_gb_per_s": ("GB/s", "min", frozenset({"bytes", "devices"})),
    "h2d_gb_per_s": ("GB/s", "min", frozenset({"bytes"})),
    "d2h_gb_per_s": ("GB/s", "min", frozenset({"bytes"})),
    "train_tokens_per_s_per_gpu": (
        "tokens/s",
        "min",
        frozenset({"model", "size", "precision", "seq", "devices", "micro_batch"}),
    ),
    "train_fsdp2_tokens_per_s_per_gpu": (
        "tokens/s",
        "min",
        frozenset({"model", "size", "layers", "precision", "seq", "devices", "micro_batch"}),
    ),
}


class ThresholdError(Exception):
    """A thresholds file is invalid; the message has one line per problem."""


@dataclass(frozen=True, kw_only=True)
class Derived:
    """The basis of a derived bound: reference x ratio x expected is what a healthy device should read.

    Attributes:
        of: What the reference is, in words.
        reference: A bound of this project, a published figure or a datasheet's figure, in the metric's unit.
        ratio: This device's datasheet figure over that of the reference's device.
        expected: The share of it that these conditions should reach, such as a smaller size.
        share: The margin for a healthy device.
        kept: This margin times those of the references, down to a figure that somebody measured or published.
    """

    of: str
    reference: float
    ratio: float
    expected: float
    share: float
    kept: float

    def bound(self, direction: Literal["min", "max"]) -> float:
        """The bound: the expected value times the share, or divided by it where less is better."""
        value = self.reference * self.ratio * self.expected
        return rounded(value * self.share if direction == "min" else value / self.share, direction)


def rounded(bound: float, direction: str) -> float:
    """The bound with four digits, rounded to the less strict side."""
    step = 10.0 ** (math.floor(math.log10(bound)) - DIGITS + 1)
    near = round(bound / step, 6)  # so that 0.7 x 100 is 70, and not 69.99
    steps = math.floor(near) if direction == "min" else math.ceil(near)
    return float(f"{steps * step:.{DIGITS}g}")


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
    kind: BoundClass
    basis: Mapping[str, Any]
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


DERIVED = frozenset(item.name for item in fields(Derived))


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
    return tuple(threshold(entry, file=str(path.relative_to(FOLDER.parent))) for entry in entries)


def threshold(entry: Mapping[str, Any], file: str = "") -> Threshold:
    """One entry of a file as a value; "class" is a keyword of Python, so its field is `kind`."""
    given = {key: value for key, value in entry.items() if key != "class"}
    return Threshold(**given, kind=entry["class"], file=file)


def find(entries: Iterable[Threshold], metric: str, conditions: Mapping[str, Any]) -> Threshold | None:
    """The entry with the most conditions that applies to a measurement."""
    judged = attention_default.judged_by(conditions)
    fitting = [entry for entry in entries if entry.holds_for(metric, judged)]
    found = max(fitting, key=lambda entry: len(entry.conditions), default=None)
    return _in_older_slot(found, conditions.get(OLDER_SLOT)) if found else None


def _in_older_slot(entry: Threshold, generation: int | None) -> Threshold:
    """The bound of a copy to or from the host where the slot is of an older generation than the device."""
    if generation not in PCIE_GB_PER_S_A_LANE or entry.metric not in HOST_COPIES:
        return entry
    ceiling = PCIE_GB_PER_S_A_LANE[generation] * LANES
    share = min(1.0, ceiling / entry.ceiling)
    source = f"{entry.source}; in a slot of PCIe generation {generation}"
    bound = rounded(entry.bound * share, entry.direction)
    return replace(entry, bound=bound, ceiling=share * entry.ceiling, source=source)


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
        if len(text) < LEAST_TEXT or any(word in text.lower() for word in PLACEHOLDERS):
            yield f"{key} is a placeholder: {text!r}"
    yield from _basis_problems(entry)


def _basis_problems(entry: Mapping[str, Any]) -> Iterator[str]:
    """Why the basis does not prove what the class claims."""
    basis: Mapping[str, Any] = entry["basis"]
    forms = {"measured": [{"file"}, {"runs"}], "published": [{"method"}], "derived": [set(DERIVED)]}
    if entry["class"] not in forms:
        yield f"class {entry['class']!r}, expected one of {', '.join(forms)}"
    elif set(basis) not in forms[entry["class"]]:
        expected = " or ".join(", ".join(sorted(form)) for form in forms[entry["class"]])
        yield f"the basis of a {entry['class']} bound has {sorted(basis)}, expected {expected}"
    elif entry["class"] == "published" and len(str(basis["method"]).strip()) < LEAST_TEXT:
        yield f"method is a placeholder: {basis['method']!r}"
    elif entry["class"] == "derived":
        yield from _derived_problems(entry, Derived(**basis))


def _derived_problems(entry: Mapping[str, Any], derived: Derived) -> Iterator[str]:
    numbers = (derived.reference, derived.ratio, derived.expected, derived.share, derived.kept)
    if not all(isinstance(number, int | float) and 0 < number < math.inf for number in numbers):
        yield f"the basis has {numbers}, expected positive numbers"
        return
    if not LEAST_EXPECTED <= derived.share <= 1:
        yield f"share {derived.share:.0%} of what is expected, expected 70 % to 100 %"
    if not LEAST_EXPECTED <= derived.kept <= derived.share:
        kept = f"all margins together keep {derived.kept:.1%}"
        yield f"{kept}, expected 70 % to the {derived.share:.0%} of this one"
    if (bound := derived.bound(entry["direction"])) != entry["bound"]:
        yield f"bound {entry['bound']:g}, its basis gives {bound:g}"


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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            yield f"{key} {value!r} is not a finite positive number"
            return
    share = bound / ceiling if entry["direction"] == "min" else ceiling / bound
    if not LOWEST_SHARE <= share <= HIGHEST_SHARE:
        yield f"bound {bound:g} is {share:.0%} of its ceiling {ceiling:g}, expected 30 % to 100 %"
