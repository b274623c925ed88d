"""Bounds of a stack from its own certificates. In: statements, a run. Out: a verdict held to them.

A floor of thresholds/ serves the slowest healthy chip of a model, and lets a fast stack lose 20 % unseen.
So a figure has to reach the stack's own certified figure too, less a margin. That figure is the best that was
certified on the same model, count and NVLS: renewals that are each a little slower never lower it. Each
certificate carries it, with the digest of the statement that measured it. A waived check starts again from
the waived run: that is the way to accept a loss. A stack without a certificate is judged by the floors alone.
"""

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.statement import VSA, Statement, facts, newest, status
from stackcheck.oci.documents import DanglingError, MissingError
from stackcheck.oci.stores import open_store
from stackcheck.suite.results import RunResult
from stackcheck.suite.verdict import Verdict

Figure = Mapping[str, Any]

# Healthy runs on chips of a model differ by up to 2.5 %, and products by 3.7 %: benchmarks/speed_gates.py.
MARGIN, PRODUCTS_MARGIN = 0.035, 0.045
# The chip moves all products together, by 2.4 to 3.1 %: one of them may lose MARGIN more than their median.
PRODUCTS = "gemm_tflops"
# Figures for which a loss of 5 % is not beyond the noise: name, bytes or backend -> margin.
WIDER = {
    ("all_to_all_busbw", 16 << 20): 0.08,
    ("h2d_gb_per_s", 256 << 20): 0.09,
    ("attention_backward_tflops", "cudnn"): 0.05,
}
# Figures without a bound, of which a stack is held to its own alone: memory at its peak. The same software
# takes the same on H100s and H200s, to 0.02 GiB.
OWN = {"train_allocated_gib": "max", "train_wide_allocated_gib": "max", "train_layout_peak": "max"}
FOUND = ("choice", "library")  # conditions that a run finds; the others say what was asked for
STATED = ("check", "name", "unit", "conditions", "direction", "value")
Key = tuple[str, str, str, str]


def read(
    target: str, tag: str, public_key: Pinned, *, plain_http: bool = False
) -> tuple[Statement, ...] | None:
    """What the key signed about the image under a tag; None if the tag was never published.

    Age does not matter here: an expired certificate still says how fast the stack was.

    Raises:
        RegistryError: The store cannot be read, or its bytes are damaged.
    """
    store = open_store(target, plain_http=plain_http)
    try:
        digest = store.read_manifest(tag).digest
    except DanglingError:
        raise
    except MissingError:
        return None
    return tuple(each.statement for each in attachments.read_envelopes(store, digest, public_key))


def held(verdict: Verdict, result: RunResult, signed: Iterable[Statement]) -> Verdict:
    """The verdict of a run, FAILED if it is slower or larger than the stack's certified figures, or lost one.

    Its `baselines` are those that the run's certificate carries.
    """
    if result.host.vendor == "cpu":  # the figures of a processor are not gated
        return verdict
    before = [figure for figure in certified(result, signed) if figure["check"] not in verdict.warned]
    measured = {key(figure): figure for figure in judged(result)}
    limits = allowed({key(figure): figure for figure in before}, measured)
    known = {check.id for check in result.checks}  # which checks there are is judged elsewhere
    found = [
        (figure["check"], reason)
        for figure in before
        if figure["check"] in known and (reason := _worse(figure, measured, limits))
    ]
    worse = dict(found)  # a check may have several figures
    return replace(
        verdict,
        status="FAILED" if found else verdict.status,
        reasons=(*verdict.reasons, *(reason for _, reason in found)),
        passed=tuple(name for name in verdict.passed if name not in worse),
        failed=(*verdict.failed, *(name for name in worse if name not in verdict.failed)),
        baselines=tuple(before),
    )


def certified(result: RunResult, signed: Iterable[Statement]) -> Sequence[Figure]:
    """The stack's best certified figures on the machine of a run, each with the digest of its statement."""
    here = machine(result.host.model_dump() | {"deviceCount": len(result.host.devices)})
    passed = (each for each in signed if each.predicate_type == VSA and status(each) == "PASSED")
    last = newest(each for each in passed if machine(facts(each)["host"]) == here)
    if last is None:
        return ()
    best = {key(figure): figure for figure in facts(last).get("baselines", ())}
    for own in map(dict, facts(last).get("metrics", ())):
        own |= {"direction": own["direction"] or OWN.get(own["name"])}
        if own["direction"] and own["value"] and not _reaches(best.get(key(own)), own):
            best[key(own)] = {name: own[name] for name in STATED} | {"statement": last.digest}
    return tuple(best.values())


def allowed(before: Mapping[Key, Figure], measured: Mapping[Key, Figure]) -> dict[Key, float]:
    """Of each certified figure, the share that a run may lose."""
    chip = [
        loss(old["value"], measured[name]["value"], old["direction"])
        for name, old in before.items()
        if old["name"] == PRODUCTS and name in measured
    ]
    products = min(PRODUCTS_MARGIN, statistics.median(chip) + MARGIN) if chip else PRODUCTS_MARGIN
    return {name: products if old["name"] == PRODUCTS else _margin(old) for name, old in before.items()}


def _margin(figure: Figure) -> float:
    asked = figure["conditions"]
    return WIDER.get((figure["name"], asked.get("bytes", asked.get("backend"))), MARGIN)


def _reaches(carried: Figure | None, own: Figure) -> bool:
    return carried is not None and loss(carried["value"], own["value"], own["direction"]) >= 0


def _worse(figure: Figure, measured: Mapping[Key, Figure], limits: Mapping[Key, float]) -> str | None:
    name = key(figure)
    said = f"{figure['check']}: {figure['name']}"
    stated = f"the certified {figure['value']:.5g} {figure['unit']} ({figure['statement'][:19]})"
    if name not in measured:
        return f"{said} was not measured, and has {stated}"
    value, limit = measured[name]["value"], limits[name]
    lost = loss(figure["value"], value, figure["direction"])
    if lost <= limit:
        return None
    return f"{said} {value:.5g} is {lost:.1%} worse than {stated}; allowed: {limit:.1%}"


def loss(certified: float, value: float, direction: str) -> float:
    """How much worse a value is than a certified one, as a share of it; negative if it is better."""
    change = value / certified - 1
    return -change if direction == "min" else change


def judged(result: RunResult) -> Iterator[dict[str, Any]]:
    """The figures of a run that a bound or the stack's own past judges, as a certificate states them."""
    for check in result.checks:
        for metric in check.metrics:
            direction = metric.direction or OWN.get(metric.name)
            if direction and metric.value:
                stated = metric.model_dump(exclude={"repeats", "ceiling"})
                yield {"check": check.id, **stated, "direction": direction}


def key(figure: Figure) -> Key:
    """What names a figure: its check, name and unit, and the conditions that were asked for."""
    asked = {
        name: value
        for name, value in figure.get("conditions", {}).items()
        if name not in FOUND and isinstance(value, str | int | bool)
    }
    return figure["check"], figure["name"], figure["unit"], json.dumps(asked, sort_keys=True)


def machine(host: Mapping[str, Any]) -> tuple[object, ...]:
    """What two runs must have in common: device models, their count, NVLink multicast."""
    models = sorted({device["model"] for device in host["devices"]})
    return tuple(models), host["deviceCount"], host.get("nvls")
