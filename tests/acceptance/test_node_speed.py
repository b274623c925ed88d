"""The speed of all devices at once, by bounds and against each other. In: n devices.
Out: metrics, slow devices.
"""

import pytest

from harness import thresholds
from harness.calls import Launch, RecordMetric
from harness.leases import Lease
from harness.session import AcceptanceSession
from workloads import speed_outliers

RANKS = {"cpu": 2, "perf": True}  # `ranks` is every device of this run, alone on the machine
TIMEOUT_S = 120
UNITS = {"gemm_tflops": "TFLOP/s", "copy_gb_per_s": "GB/s"}
LEAST_OF_MEDIAN = 0.9  # healthy H200s of one node differ by 3 %; chips and cooling can explain 5 %
pytestmark = pytest.mark.gate


@pytest.mark.tier("standard")
def test_every_device_at_once(
    ranks: int, lease: Lease, acceptance: AcceptanceSession, launch: Launch, record_metric: RecordMetric
) -> None:
    """While all devices work, each multiplies and copies at its model's speed, and as fast as the others."""
    found = launch("node_speed.py", nproc=ranks, timeout_s=TIMEOUT_S)["ranks"]
    assert len(found) == ranks, f"{len(found)} devices were measured, expected {ranks}"
    numbers = range(ranks) if acceptance.shares_devices else [device.index for device in lease.devices]
    entries = thresholds.load(thresholds.path_of(acceptance.vendor, acceptance.model))
    slow: list[str] = []
    for metric, unit in UNITS.items():
        figures = {number: one[metric] for number, one in zip(numbers, found, strict=True)}
        for number, figure in figures.items():
            conditions = {"device": number, **figure["conditions"]}
            record_metric(
                f"together_{metric}",
                figure["value"],
                unit=unit,
                repeats=figure["repeats"],
                conditions=conditions,
            )
        for number, figure in figures.items():  # without a bound of one device test_kernel_speed.py fails
            entry = thresholds.find(entries, metric, figure["conditions"])
            if entry is not None and not entry.accepts(figure["value"]):
                reached = f"{figure['value']:.4g} {entry.unit} < {entry.bound:g} {entry.unit}"
                words = f"device {number} reaches {reached}\n  bound from {entry.file}: {entry.source}"
                slow.append(f"{metric}: {words}")
        if not acceptance.shares_devices:  # ranks on a CPU take each other's cores
            rates = {number: figure["value"] for number, figure in figures.items()}
            slow += [
                f"{metric}: {line}" for line in speed_outliers.slow_devices(rates, LEAST_OF_MEDIAN, unit)
            ]
    assert not slow, "\n".join(slow)
