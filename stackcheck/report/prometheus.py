"""Figures for Prometheus' node_exporter (textfile collector). In: `Content`. Out: its text format.

Each series carries `simulated`, so that no alert fires for a run that nobody ran. grafana.json draws them.
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from stackcheck.history.runs import Run
from stackcheck.report import standing
from stackcheck.report.content import Content
from stackcheck.report.speed import SpeedGroup

HELP = {
    "stackcheck_report_time_seconds": "When these figures were written.",
    "stackcheck_published_known": "1 if the published certificates could be read.",
    "stackcheck_certified": "1 if the stack is certified there and its newest run did not fail.",
    "stackcheck_certificate_expires_seconds": "When the certificate ends.",
    "stackcheck_certificate_waivers": "Checks that waivers of the certificate accept.",
    "stackcheck_run_status": "1 for the verdict of the newest run: PASSED, FAILED or UNFIT.",
    "stackcheck_run_time_seconds": "When the newest run started.",
    "stackcheck_run_failed_checks": "Checks that failed in the newest run.",
    "stackcheck_metric": "The newest value of a figure that a bound judges, in its unit.",
    "stackcheck_metric_bound": "The bound of that figure.",
    "stackcheck_metric_margin_ratio": "By which share it is better than its bound; negative: outside.",
}
Sample = tuple[str, dict[str, str], float]


def render(content: Content) -> str:
    """The text, with every metric's lines together, as the format asks."""
    samples: dict[str, list[Sample]] = {name: [] for name in HELP}
    for sample in _samples(content):
        samples[sample[0]].append(sample)
    lines = []
    for name, found in samples.items():
        if found:
            lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
            lines += [_line(*sample) for sample in found]
    return "\n".join(lines) + "\n"


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard that draws these figures."""
    text = files("stackcheck.report").joinpath("assets", "grafana.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def _samples(content: Content) -> Iterator[Sample]:
    yield ("stackcheck_report_time_seconds", {}, content.made.timestamp())
    yield ("stackcheck_published_known", {}, float(content.offered.problem is None))
    for cell in content.cells:
        yield from _cell(cell, known=content.offered.problem is None)
    # The newest run of each stack on each machine and number of devices.
    newest = {(run.stack, standing.machine_of(run), run.device_count): run for run in content.runs}
    for run in newest.values():
        labels = _labels(run)
        for status in ("PASSED", "FAILED", "UNFIT"):
            yield ("stackcheck_run_status", labels | {"status": status}, float(run.status == status))
        yield ("stackcheck_run_time_seconds", labels, run.started.timestamp())
        yield ("stackcheck_run_failed_checks", labels, float(len(run.failed)))
    for group in content.groups:
        yield from _figures(group)


def _cell(cell: standing.StandingCell, *, known: bool) -> Iterator[Sample]:
    labels = {
        "stack": cell.stack,
        "device_model": cell.machine.device_model,
        "driver": cell.machine.driver,
        "simulated": _word(simulated=cell.simulated),
    }
    if known:  # without the certificates nothing is said, and an alert on absence fires
        yield ("stackcheck_certified", labels, float(cell.state == "certified"))
    if cell.offer is not None:
        expires = cell.offer.machine.expires.timestamp()
        yield ("stackcheck_certificate_expires_seconds", labels, expires)
        yield ("stackcheck_certificate_waivers", labels, float(len(cell.offer.machine.warned)))


def _figures(group: SpeedGroup) -> Iterator[Sample]:
    for series in group.series:
        if series.margin is None or series.latest is None or series.bound is None:
            continue
        at = max(number for number, value in enumerate(series.values) if value is not None)
        labels = _labels(group.runs[at]) | {"check": series.check, "metric": series.name, "unit": series.unit}
        yield ("stackcheck_metric", labels, series.latest)
        yield ("stackcheck_metric_bound", labels, series.bound)
        yield ("stackcheck_metric_margin_ratio", labels, series.margin)


def _labels(run: Run) -> dict[str, str]:
    return {
        "stack": run.stack,
        "device_model": run.device_model,
        "device_count": str(run.device_count),
        "driver": run.driver or "",
        "simulated": _word(simulated=run.simulated),
    }


def _word(*, simulated: bool) -> str:
    return "true" if simulated else "false"


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in sorted(labels.items()))
    return f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}"


def _escaped(text: str) -> str:
    """A label's value: backslash, quote and line feed are escaped, as the format asks; no other controls."""
    printable = "".join(char for char in text if char.isprintable() or char == "\n")
    return printable.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
