"""How the outcomes of `stackcheck images` are printed. In: outcomes. Out: a table or JSON on stdout."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, Any

from stackcheck.cli.build import gigabytes
from stackcheck.cli.output import print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stackcheck.flow import StackOutcome


def show(outcomes: Sequence[StackOutcome], *, as_json: bool) -> None:
    """Print a table and the next commands to type, or one JSON document."""
    if as_json:
        print_json([_row(outcome) for outcome in outcomes])
    else:
        _print_outcomes(outcomes)


def _print_outcomes(outcomes: Sequence[StackOutcome]) -> None:
    columns = ("stack", "state", "passed/failed/skipped", "digest", "size", "time")
    print_table(columns, [_cells(outcome) for outcome in outcomes])
    for outcome in outcomes:
        _print_one(outcome)


def _print_one(outcome: StackOutcome) -> None:
    print()
    if outcome.error:
        print(f"{outcome.name}: {outcome.error}")
        return
    for name, value in _figures(outcome):
        print(f"  {name}: {value}")
    print(f"{outcome.name}: {outcome.state}{': ' + outcome.reason if outcome.reason else ''}")
    print(f"  certificate: {outcome.reference}")
    print(f"  next: {_program()} verify {outcome.reference}")
    print(
        f"        {_program()} run {outcome.reference} -- python3 -c 'import torch; print(torch.__version__)'"
    )


def _program() -> str:
    """How the user types this program: its name if it is on PATH, else the path it was started by."""
    return "stackcheck" if shutil.which("stackcheck") else os.path.relpath(sys.argv[0])


def _figures(outcome: StackOutcome) -> list[tuple[str, str]]:
    """The first measured rates (metrics in some unit per second), as name and value."""
    checks = outcome.result.checks if outcome.result else ()
    metrics = [metric for check in checks for metric in check.metrics if "/s" in metric.unit]
    return [(metric.name, f"{metric.value:,.1f} {metric.unit}") for metric in metrics if metric.value][:6]


def _cells(outcome: StackOutcome) -> tuple[str, ...]:
    judged = outcome.verdict
    counts = f"{len(judged.passed)}/{len(judged.failed)}/{len(judged.skipped)}" if judged else "-"
    image = outcome.image
    digest = image.manifest_digest[:19] if image else "-"
    size = gigabytes(image) if image else "-"
    return (outcome.name, outcome.state, counts, digest, size, f"{outcome.seconds:.1f} s")


def _row(outcome: StackOutcome) -> dict[str, Any]:
    return {
        "id": outcome.name,
        "state": outcome.state,
        "reason": outcome.reason,
        "digest": outcome.image.manifest_digest if outcome.image else None,
        "size_bytes": outcome.image.size_bytes if outcome.image else None,
        "verdict": outcome.verdict.status if outcome.verdict else None,
        "reference": outcome.reference,
        "seconds": round(outcome.seconds, 3),
    }
