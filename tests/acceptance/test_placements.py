"""Drawn placements: PyTorch's operators on DTensors, and attention over shards of a sequence.

In: n devices, or two gloo ranks. Out: what failed.

`--case-seed` draws others. Cases whose failure a known fault of torch explains pass, and are counted
(docs/reference/trust.md).
"""

import pytest

from harness import skips
from harness.calls import Launch, RecordMetric
from harness.overdue import OverdueError
from harness.session import AcceptanceSession
from workloads import generated_report

RANKS = {"cpu": 2}  # `ranks` is every device of this run
# So many cases in any case, then more until the seconds are over, at most so many; on a processor, on GPUs.
DRAWN = {"least": 600, "most": 20_000, "seconds": 60}, {"least": 1200, "most": 20_000, "seconds": 300}
TIMEOUT_S = 900
LEAST = 0.4  # of the drawn cases, that torch takes and float64 can judge
ATTENTION = {"least": 60, "most": 600, "seconds": 60}
LEAST_ATTENTION = 0.9


# No tier that certifies has it: it has not run on a GPU (docs/reference/trust.md).
@pytest.mark.tier("soak")
def test_generated_placements(
    ranks: int,
    *,
    acceptance: AcceptanceSession,
    launch: Launch,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """An operator on placed operands gives what it gives on whole ones, on all ranks; so do its gradients.

    Two runs with one seed draw the same cases; the one on a slower machine ends earlier, but never before
    the least number of them.
    """
    asked = {"seed": pytestconfig.getoption("case_seed"), **DRAWN[acceptance.vendor != "cpu"]}
    words = [str(word) for name, value in asked.items() for word in (f"--{name}", value)]
    report = launch("generated_placements.py", *words, nproc=ranks, timeout_s=TIMEOUT_S)
    if report["hung"]:
        raise OverdueError("\n".join([f"did not end: {report['hung']}", *report["failed"]]))
    for fault, count in report["passed over"].items():
        record_metric("known_faults", count, unit="cases", conditions={"fault": fault})
    generated_report.require(report, record_metric, LEAST)


# No tier that certifies has it (docs/reference/trust.md).
@pytest.mark.tier("soak")
def test_generated_context_parallel(
    ranks: int, *, launch: Launch, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Attention whose rows lie on several ranks gives what it gives on one, and so do its gradients."""
    asked = {"seed": pytestconfig.getoption("case_seed"), **ATTENTION}
    words = [str(word) for name, value in asked.items() for word in (f"--{name}", value)]
    report = launch("generated_context.py", *words, nproc=ranks, timeout_s=TIMEOUT_S)
    skips.if_lacking(report.get("lacks"))
    if report["hung"]:
        raise OverdueError("\n".join([f"did not end: {report['hung']}", *report["failed"]]))
    generated_report.require(report, record_metric, LEAST_ATTENTION)
