"""Derive the bounds that nobody has measured or published.
In: derived.json, published/, devices.json and the other bounds. Out: the derived entries of thresholds/,
written, or with --check what differs.

Run it in tests/acceptance: `python -m harness.derive`. A rule of derived.json says for some metrics and
models which figure is the reference, which share of it these conditions should reach, and the margin; the
first rule that fits a figure decides. docs/reference/thresholds.md explains the rules.
"""

import argparse
import functools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import bounds, models, thresholds
from harness.thresholds import Derived, Threshold
from workloads import gated

RULES = thresholds.FOLDER.with_name("derived.json")
PUBLISHED = thresholds.FOLDER.with_name("published")
PUBLISHED_KEYS = {"metric", "conditions", "value", "unit", "suggests", "source", "method"}
SHAPES = ("m", "n", "k", "layout", "bytes", "sequence")  # what the best figure is the best of
Conditions = Mapping[str, Any]


class DeriveError(Exception):
    """A figure has no rule, or a rule cannot be applied."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How the bounds of some figures follow from another figure.

    Attributes:
        metrics, models, where: Which figures it is for; no models means all, `where` are some conditions.
        of: The reference: {"peak": true}, the best figure that others published ({"published": conditions},
            without any: the figure's own), or a bound ({"model", "metric", "conditions"}: what differs).
        expected: The share of the reference to expect, also by the bytes of the figure.
        share: The margin: the bound is this share of what is expected. It is cut where the margins of the
            references and this one together would keep less than 70 % of the figure that somebody read.
        ratio: Whether the reference is scaled by the two devices' figures in devices.json.
        because: Why.
    """

    metrics: Sequence[str]
    of: Mapping[str, Any]
    share: float
    because: str
    models: Sequence[str] = ()
    where: Conditions
    expected: float | Mapping[str, float] = 1.0
    ratio: bool = False

    def fits(self, model: str, metric: str, conditions: Conditions) -> bool:
        """Whether the rule is for this figure of this model."""
        named = metric in self.metrics and (not self.models or model in self.models)
        return named and all(conditions.get(key) == value for key, value in self.where.items())

    def expects(self, conditions: Conditions) -> float:
        """The share of the reference to expect under these conditions."""
        if isinstance(self.expected, Mapping):
            return self.expected[str(conditions["bytes"])]
        return self.expected


@functools.cache
def rules() -> tuple[Rule, ...]:
    """The rules of derived.json, in their order."""
    return tuple(Rule(**{"where": {}, **rule}) for rule in _file()["rules"])


def counts(model: str) -> tuple[int, ...]:
    """The numbers of devices for which a model has bounds:
    one, and those of its usual node; none, where too little is known of it.
    """
    given: Mapping[str, Sequence[int]] = _file()["counts"]
    return tuple(given.get(model, given["default"]))


@functools.cache
def published(model: str) -> tuple[Mapping[str, Any], ...]:
    """The public figures of a model."""
    path = PUBLISHED / models.row(model)["vendor"] / f"{model}.json"
    if not path.exists():
        return ()
    return tuple(json.loads(path.read_text(encoding="utf-8"))["published"])


@functools.cache
def known(model: str) -> tuple[Threshold, ...]:
    """The bounds of a model that are not derived. Raises `ThresholdError`."""
    entries = _known(model)
    if found := list(thresholds.lint(entries)):
        raise thresholds.ThresholdError(f"{_path(model)}:\n" + "\n".join(found))
    return tuple(thresholds.threshold(entry, _file_of(model)) for entry in entries)


def _known(model: str) -> list[dict[str, Any]]:
    path = _path(model)
    lines = json.loads(path.read_text(encoding="utf-8"))["thresholds"] if path.exists() else []
    return [entry for entry in lines if entry.get("class") != "derived"]


def derived(model: str) -> list[dict[str, Any]]:
    """The entries that a model needs and that nobody measured or published, for all of its counts."""
    found: dict[str, dict[str, Any]] = {}
    for count in counts(model):
        for metric, conditions in gated.figures(models.row(model), count, "soak"):
            # Also with NVLink multicast, if a rule tells it apart.
            multicast = {**conditions, "nvls": "on"}
            apart = any("nvls" in rule.where and rule.fits(model, metric, multicast) for rule in rules())
            for given in (conditions, multicast) if apart else (conditions,):
                if thresholds.find(known(model), metric, given) is None or given is not conditions:
                    key = json.dumps([metric, given], sort_keys=True)
                    found[key] = _entry(model, metric, given)
    return list(found.values())


def _bound_and_kept(model: str, metric: str, conditions: Conditions, depth: int) -> tuple[float, float]:
    """The bound of a figure, the known one or the derived one, and what its margins keep of its root.

    A bound that was measured or published is a root itself: its own margin is its author's.
    """
    entry = thresholds.find(known(model), metric, conditions)
    if entry is not None:
        return entry.bound, 1.0
    basis = _basis(_rule_of(model, metric, conditions), model, metric, conditions, depth)
    return basis.bound(thresholds.METRICS[metric][1]), basis.kept


def problems(model: str) -> Iterator[str]:
    """What is wrong with the committed bounds of a model, one line each:
    drift, bounds far under the best public figure, and derived ones above it.
    """
    for number, row in enumerate(published(model), start=1):
        if set(row) != PUBLISHED_KEYS:
            yield f"{model}: published figure {number} has {sorted(row)}, expected {sorted(PUBLISHED_KEYS)}"
            return
    try:
        committed = thresholds.load(_path(model))
    except thresholds.ThresholdError as error:
        yield str(error)
        return
    have = {_key(e.metric, e.conditions): e for e in committed if e.kind == "derived"}
    made = (thresholds.threshold(entry, _file_of(model)) for entry in derived(model))
    want = {_key(e.metric, e.conditions): e for e in made}
    for key in sorted(have.keys() | want.keys()):
        old, new = have.get(key), want.get(key)
        if old != new:
            yield f"{model}: {key} is {_words(old)} in the file and {_words(new)} by the rules"
    yield from too_loose(model, committed)
    yield from above_the_best(model, committed)


def too_loose(model: str, entries: Sequence[Threshold]) -> Iterator[str]:
    """Bounds under 70 % of what the best public figure for the same conditions suggests."""
    for entry in entries:
        for row in published(model):
            if not entry.holds_for(row["metric"], row["conditions"]):
                continue
            least, suggested = thresholds.LEAST_EXPECTED, row["suggests"]
            floor = least * suggested if entry.direction == "min" else suggested / least
            if not (entry.bound >= floor if entry.direction == "min" else entry.bound <= floor):
                yield (
                    f"{model}: {_key(entry.metric, entry.conditions)}: bound {entry.bound:g} is looser than "
                    f"{floor:.4g}, 70 % of what {row['source']} suggests ({suggested:g})"
                )


def above_the_best(model: str, entries: Sequence[Threshold]) -> Iterator[str]:
    """Derived bounds that nobody has reached: stricter than the best public figure of the metric.

    Of more is better, the best over all shapes and sizes counts: a shape that nobody published is not faster
    than the best of the others. A latency grows with the size, so only its own size counts.
    """
    for entry in entries:
        if entry.kind != "derived":
            continue
        most = entry.direction == "min"
        held = {key: value for key, value in entry.conditions.items() if not (most and key in SHAPES)}
        same = [row for row in published(model) if row["metric"] == entry.metric and _agrees(row, held)]
        if not same:
            continue
        best = (max if most else min)(same, key=lambda row: float(row["value"]))
        if entry.bound > best["value"] if most else entry.bound < best["value"]:
            yield (
                f"{model}: {_key(entry.metric, entry.conditions)}: bound {entry.bound:g} is stricter than"
                f" {best['value']:g}, the best public figure ({best['source']}); derive it from that one"
            )


def _agrees(row: Mapping[str, Any], held: Conditions) -> bool:
    return all(row["conditions"].get(key, value) == value for key, value in held.items())


def written(model: str) -> str:
    """The text of a model's file with its derived entries made anew."""
    text = (" " + json.dumps(entry, ensure_ascii=False) for entry in (*_known(model), *derived(model)))
    return '{"thresholds": [\n' + ",\n".join(text) + "\n]}\n"


def _entry(model: str, metric: str, conditions: Conditions) -> dict[str, Any]:
    unit, direction, _ = thresholds.METRICS[metric]
    rule = _rule_of(model, metric, conditions)
    basis = _basis(rule, model, metric, conditions)
    bound = basis.bound(direction)
    expected = basis.reference * basis.ratio * basis.expected
    physical = bounds.ceiling(models.row(model), metric, conditions)
    real = physical is not None and physical >= bound >= thresholds.LOWEST_SHARE * physical
    sign = "of" if direction == "min" else "as a divisor of"
    return {
        "metric": metric,
        "conditions": dict(conditions),
        "bound": bound,
        "unit": unit,
        "direction": direction,
        "ceiling": physical if real else float(f"{expected:.4g}"),
        "source": f"derived from {basis.of}: {rule.because}",
        "tolerance": f"{basis.share:.0%} {sign} the {expected:.4g} {unit} that are expected; with the margins"
        f" of its references {basis.kept:.0%}",
        "class": "derived",
        "basis": asdict(basis),
    }


def _basis(rule: Rule, model: str, metric: str, conditions: Conditions, depth: int = 0) -> Derived:
    if depth > len(rules()):
        raise DeriveError(
            f"{model}: the rules for {_key(metric, conditions)} refer to each other in a circle"
        )
    words, reference, other, before = _reference(rule, model, metric, conditions, depth)
    # Rounded up to four digits, so that all margins of a chain together keep what they must.
    share = max(rule.share, math.ceil(thresholds.LEAST_EXPECTED / before * 1e4 - 1e-6) / 1e4)
    ratio = 1.0
    if rule.ratio:
        ratio = _capacity(model, metric, conditions) / _capacity(other, metric, conditions)
    return Derived(
        of=words,
        reference=reference,
        ratio=float(f"{ratio:.6g}"),
        expected=rule.expects(conditions),
        share=share,
        kept=float(f"{share * before:.4f}"),
    )


def _reference(
    rule: Rule, model: str, metric: str, conditions: Conditions, depth: int
) -> tuple[str, float, str, float]:
    """The reference in words, its value, the model that it is of, and what its own margins keep."""
    of = rule.of
    other, kind = of.get("model", model), of.get("metric", metric)
    if of.get("peak"):
        peak = _capacity(model, metric, conditions)
        return f"{model}'s datasheet, {peak:g} {thresholds.METRICS[metric][0]}", peak, model, 1.0
    if "published" in of:
        row = _published(other, kind, of["published"] or conditions)
        return f"{other}, published: {row['source']}", row["suggests"], other, 1.0
    changed = {**conditions, **of.get("conditions", {})}
    if (kind, other, changed) == (metric, model, dict(conditions)):
        raise DeriveError(f"{model}: the rule for {_key(metric, conditions)} refers to itself")
    selecting = {key: value for key, value in changed.items() if key in thresholds.METRICS[kind][2]}
    words = f"the bound of {kind} on {other}"
    if differs := {key: value for key, value in changed.items() if conditions.get(key) != value}:
        words += f" with {json.dumps(differs, sort_keys=True)}"
    bound, kept = _bound_and_kept(other, kind, selecting, depth + 1)
    return words, bound, other, kept


def _published(model: str, metric: str, conditions: Conditions) -> Mapping[str, Any]:
    """The best public figure with these conditions."""
    same = [row for row in published(model) if row["metric"] == metric and _agrees(row, conditions)]
    if not same:
        raise DeriveError(f"published/ has no {_key(metric, conditions)} of {model}")
    best = max if thresholds.METRICS[metric][1] == "min" else min
    return best(same, key=lambda row: float(row["suggests"]))


def _rule_of(model: str, metric: str, conditions: Conditions) -> Rule:
    for rule in rules():
        if rule.fits(model, metric, conditions):
            return rule
    raise DeriveError(f"{model}: no rule of {RULES.name} is for {_key(metric, conditions)}")


def _capacity(model: str, metric: str, conditions: Conditions) -> float:
    """The figure of devices.json that the metric grows with."""
    row = models.row(model)
    found = bounds.ceiling(row, metric, {**conditions, "nvls": "off"})
    if thresholds.METRICS[metric][0] == "tokens/s":
        found = row["peak_tflops"]["bf16"]
    if found is None:
        raise DeriveError(f"devices.json has no figure of {model} that {_key(metric, conditions)} grows with")
    return float(found)


def _key(metric: str, conditions: Conditions) -> str:
    return f"{metric} {json.dumps(dict(conditions), sort_keys=True)}"


def _words(entry: Threshold | None) -> str:
    return "absent" if entry is None else f"{entry.bound:g} ({json.dumps(dict(entry.basis))})"


def _path(model: str) -> Path:
    return thresholds.path_of(models.row(model)["vendor"], model)


def _file_of(model: str) -> str:
    return str(_path(model).relative_to(thresholds.FOLDER.parent))


@functools.cache
def _file() -> Mapping[str, Any]:
    content: Mapping[str, Any] = json.loads(RULES.read_text(encoding="utf-8"))
    return content


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m harness.derive")
    parser.add_argument("--check", action="store_true", help="write nothing; name what differs")
    check = parser.parse_args().check
    named = [row["model"] for row in models.table() if row["vendor"] != "cpu"]
    if not check:
        for model in named:
            if counts(model):  # else it is known, and cannot be certified yet
                _path(model).write_text(written(model), encoding="utf-8")
        thresholds.load.cache_clear()
    found = [line for model in named for line in problems(model)]
    for line in found:
        print(line, file=sys.stderr)
    if found:
        print(
            "next: correct derived.json, then python -m harness.derive in tests/acceptance", file=sys.stderr
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
