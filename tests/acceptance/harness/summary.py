"""The end of the terminal output. In: the result. Out: for each check that did not pass, what a person
needs to act.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness import causes
from harness.resultfile import ResultFile

if TYPE_CHECKING:
    import pytest

SHOWN = 20  # a machine without devices fails every check with one reason; the file has them all


def write(terminal: "pytest.TerminalReporter", results: ResultFile, model: str, devices: int) -> None:
    """Print the summary."""
    checks = results.content["checks"]
    counts = Counter(check["outcome"] for check in checks)
    terminal.section("stackcheck")
    bad = [check for check in checks if check["outcome"] in ("failed", "error", "invalid")]
    for check in bad[:SHOWN]:
        for line in _lines(check, model, devices, results.content["host"]["vendor"]):
            terminal.write_line(line)
    if len(bad) > SHOWN:
        terminal.write_line(f"and {len(bad) - SHOWN} more")
    for reason, count in Counter(
        check["reason"] for check in checks if check["outcome"] == "skipped"
    ).items():
        terminal.write_line(f"skipped {count}: {reason}")
    total = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "no check ran"
    terminal.write_line(f"{model} x{devices}: {total}; {results.path}")


def _lines(check: Mapping[str, Any], model: str, devices: int, vendor: str) -> Iterator[str]:
    yield f"{check['outcome'].upper()} {check['id']} on {model} x{len(check['devices']) or devices}"
    if check["doc"]:
        yield f"  proves: {check['doc']}"
    for line in (check["reason"] or "").splitlines()[:8]:
        yield f"  {line}"
    for metric in check["metrics"]:
        if metric["verdict"] in ("fail", "no_threshold"):
            yield f"  got {metric['value']} {metric['unit']}, bound {metric['bound']} ({metric['source']})"
            yield from (f"  look at: {cause}" for cause in causes.likely(metric["name"]))
    yield f"  next: {causes.next_command(check['id'], vendor)}"
