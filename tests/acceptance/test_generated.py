"""Generated cases: operators, sizes, masks and programs that nobody named, judged by float64.

In: one device. Out: the cases that failed, each as small as it gets. `--case-seed` draws others.
"""

import pytest

from harness import skips
from harness.calls import OnDevice, RecordMetric
from harness.session import AcceptanceSession
from workloads import generated, generated_sizes

SOAK_S = 2400
STANDARD_S = 300
HUGE, LEAST_HUGE = 24, 0.3  # those of 2^32 elements need twice the memory
# The least share of the drawn cases that float64 can judge: a variation fits some samples only.
LEAST = {"operators": 0.4, "sizes": 0.9, "attention": 0.5, "chains": 0.5}


@pytest.mark.gpus(1)
@pytest.mark.parametrize(
    "family",
    ["operators", "sizes", "attention", pytest.param("chains", marks=pytest.mark.tier("standard"))],
)
def test_generated(
    family: str,
    acceptance: AcceptanceSession,
    on_device: OnDevice,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """Drawn cases of this family are as near to float64 as their inputs' precision allows.

    What is drawn is the same in every run with the same seed.
    """
    limit_s = SOAK_S if acceptance.tier == "soak" else STANDARD_S
    seed = pytestconfig.getoption("case_seed")
    report = on_device(generated.of_tier, family=family, tier=acceptance.tier, seed=seed, timeout_s=limit_s)
    generated.require(report, record_metric, LEAST[family])


@pytest.mark.tier("soak")
@pytest.mark.gpus(1, whole=True)
def test_generated_beyond_32_bits(
    on_device: OnDevice, record_metric: RecordMetric, pytestconfig: pytest.Config
) -> None:
    """Operators of more than 2^31 and 2^32 elements are right, on a device that has the memory."""
    skips.if_lacking(on_device(generated_sizes.lacks))
    seed = pytestconfig.getoption("case_seed")
    report = on_device(generated.check, family="sizes", seed=seed, count=HUGE, sizes="huge", timeout_s=SOAK_S)
    generated.require(report, record_metric, LEAST_HUGE)
