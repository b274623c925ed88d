"""The hard floor. In: the figures that a certificate states, and a run. Out: the checks far below it. Pure.

A bound allows the slowest chip of a model, and a derived bound much more. No night explains a loss of 10 %
against the run that was certified: it counts as a failure, and like one it is repeated once, at once.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from stackcheck.history import regressions
from stackcheck.nightly.state import Figure
from stackcheck.suite.results import RunResult

Key = tuple[str, str, str, str]


def figures(certificate: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The judged figures that a certificate states, as a plan keeps them."""
    for metric in (*certificate.get("metrics", ()), *certificate.get("baselines", ())):
        if metric.get("direction") and metric.get("value"):
            key = _key(metric["check"], metric["name"], metric["unit"], metric.get("conditions", {}))
            yield {"key": key, "value": metric["value"], "direction": metric["direction"]}


def below(certified: Iterable[Figure], result: RunResult) -> dict[str, str]:
    """Check -> what is far below its certified figure. One more run decides: `regressions.floor`."""
    measured = {
        _key(check.id, metric.name, metric.unit, metric.conditions): (check.id, metric)
        for check in result.checks
        for metric in check.metrics
    }
    found = {}
    for figure in certified:
        check, metric = measured.get(figure.key, ("", None))
        if metric is None or metric.value is None:
            continue
        if regressions.floor(figure.value, metric.value, None, figure.direction) == "repeat":
            loss = regressions.loss(figure.value, metric.value, figure.direction)
            found[check] = (
                f"{metric.name} of {check}: {metric.value:.5g} {metric.unit}, {loss:.1%} worse than the "
                f"certified {figure.value:.5g}"
            )
    return found


def _key(check: str, name: str, unit: str, conditions: Mapping[str, Any]) -> Key:
    return check, name, unit, json.dumps(conditions, sort_keys=True)
