"""Training for some 200 steps: what does a process hold on to? In: one device. Out: what grows by step."""

import pytest

from harness.calls import OnDevice, RecordMetric
from harness.check import Check
from workloads import growth

TIMEOUT_S = 900


@pytest.mark.tier("soak")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("action", growth.ACTIONS)
def test_nothing_grows(action: str, on_device: OnDevice, check: Check, record_metric: RecordMetric) -> None:
    """A block that trains eagerly, compiled, recomputed and in autocast holds no more after 200 steps.
    Read are memory of host and device, tensors, threads, descriptors, children, graphs and the step's time.
    """
    found = on_device(growth.check, action=action, timeout_s=TIMEOUT_S)
    check.more_evidence["growth"] = found
    slower = max(one["last_s"] / one["first_s"] for one in found)
    record_metric("growth_step_time", slower, unit="ratio", conditions={"action": action})
    if peak := max(one["peak_bytes"] for one in found):  # a processor has none
        record_metric("growth_peak_bytes", peak, unit="B", conditions={"action": action})
    problems = [f"{one['subject']}: {words}" for one in found for words in one["problems"]]
    assert not problems, "\n".join(problems)
