"""Drawn layouts of training and checkpoints between them. In: n devices, or two gloo ranks. Out: what failed.

`--case-seed` draws others. A case that ends its ranks is the last that they named; so is one that hangs.
Cases whose failures a known fault of torch explains pass, and are counted (docs/reference/trust.md).
"""

import pytest

from harness import processes
from harness.calls import Launch, RecordMetric
from harness.overdue import OverdueError
from harness.session import AcceptanceSession
from workloads import cases

RANKS = {"cpu": 2}  # `ranks` is every device of this run
# Each has every parallel layout. All of them plain, recomputed and compiled, in both types, are so many in
# turn; a seed begins where the one before ends.
COUNTS = {"layouts": 30, "checkpoints": 15}
TURNS = {"layouts": 42, "checkpoints": 30}
TIMEOUT_S = 900
# The largest share of them in which known faults of torch may hide all others: a processor has a seventh of
# both together, two H100s had three quarters of eight checkpoints.
MOST_KNOWN = {"layouts": 0.5, "checkpoints": 0.95}


# No tier that certifies has them: they have not run on a GPU (docs/reference/trust.md).
@pytest.mark.tier("soak")
@pytest.mark.parametrize("family", COUNTS)
def test_generated_layouts(
    family: str,
    ranks: int,
    *,
    acceptance: AcceptanceSession,
    launch: Launch,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """Steps in drawn layouts of torch are those of one rank in float64; a checkpoint keeps each bit."""
    seed = pytestconfig.getoption("case_seed")
    record_metric("generated_seed", seed, unit="seed")
    first = seed * COUNTS[family] % TURNS[family]
    asked = (family, seed, first, COUNTS[family], processes.inside(acceptance.result_dir))
    report = launch("generated_layouts.py", *asked, nproc=ranks, timeout_s=TIMEOUT_S)
    passed_over = sum("known" in case for case in report["cases"])
    record_metric("known_faults", passed_over, unit="cases")
    if report["hung"] and not any(case["failures"] for case in report["cases"]):
        raise OverdueError(f"{report['hung']['name']}: {report['hung']['failures'][0]}")
    cases.require({"cases": report["cases"]}, record_metric)
    drawn = len(report["cases"])
    assert passed_over <= MOST_KNOWN[family] * drawn, f"known faults hide {passed_over} of {drawn} cases"
