"""Generated cases: operators, sizes, masks and programs that nobody named, judged by float64.

In: one device. Out: the cases that failed, each as small as it gets. `--case-seed` draws others.
"""

import pytest

from harness import skips
from harness.calls import OnDevice, RecordMetric
from harness.session import AcceptanceSession
from workloads import generated

LIMIT_S = 900  # the least number of cases takes a minute; what a tier may take is in workloads/generated.py
SOAK_S = 2400
# The least share of the drawn cases that float64 can judge: a size or a layout fits some samples only.
LEAST = {"operators": 0.85, "sizes": 0.9, "attention": 0.5, "chains": 0.5}
# Attention waits for healthy runs on GPUs: the only one found what nobody confirmed (reference/trust.md).
FAMILIES = {"operators": "smoke", "sizes": "standard", "chains": "standard", "attention": "soak"}


@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=pytest.mark.tier(tier)) for family, tier in FAMILIES.items()]
)
def test_generated(
    family: str,
    acceptance: AcceptanceSession,
    on_device: OnDevice,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """Drawn cases of this family are as near to float64 as their inputs' precision allows.

    What is drawn is the same in every run with the same seed; on a slower machine it ends earlier, but not
    before each operator and type had one case.
    """
    if family == "operators":
        skips.if_lacking(on_device(generated.lacks_a_processor))
    seed, limit_s = pytestconfig.getoption("case_seed"), SOAK_S if acceptance.tier == "soak" else LIMIT_S
    report = on_device(generated.of_tier, family=family, tier=acceptance.tier, seed=seed, timeout_s=limit_s)
    generated.require(report, record_metric, LEAST[family])
