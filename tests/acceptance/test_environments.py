"""Drawn environments: variables that users set, which an image is not certified with. In: n devices.

Out: the cases that failed, each with the variables that it takes. In soak, `--case-seed` draws others.
"""

import pytest

from harness.calls import OnDevice, RecordMetric
from harness.overdue import OverdueError
from harness.session import AcceptanceSession
from workloads import generated_environments, generated_report

RANKS = {"cpu": 2}  # `ranks` is every device of this run, which choices of devices are drawn from
SOAK_S = 3600
LEAST = 0.8  # of the drawn cases, that no library refuses


# No tier that certifies has it: it has not run on AMD's hardware (docs/reference/trust.md).
@pytest.mark.tier("soak")
def test_generated_environments(
    ranks: int,
    *,
    acceptance: AcceptanceSession,
    on_device: OnDevice,
    record_metric: RecordMetric,
    pytestconfig: pytest.Config,
) -> None:
    """Documented variables hide no device but those that they should, and change no result beyond roundings.

    Devices, products, convolutions, attention, collectives and three steps of FSDP2, in new processes.
    """
    assert ranks
    asked = {"vendor": acceptance.vendor, "seed": pytestconfig.getoption("case_seed")}
    report = on_device(generated_environments.of_soak, **asked, timeout_s=SOAK_S)
    if report["hung"] and report["hung"] == len(report["failed"]):
        raise OverdueError("\n".join(report["failed"]))
    generated_report.require(report, record_metric, LEAST)
