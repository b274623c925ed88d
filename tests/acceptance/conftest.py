"""The fixtures of the acceptance suites; what each one means is written in harness/fixtures.py.

Checks are marked `gpus(n, perf=…)` and `tier(…)`, and ask for `on_device`, `launch` and `record_metric`.
"""

from harness.check import invalid
from harness.fixtures import (
    _leased_when_marked,
    acceptance,
    check,
    device_model,
    device_row,
    devices,
    host,
    launch,
    lease,
    on_device,
    record_metric,
    vendor,
    whole_run,
)
from harness.static import in_child

__all__ = [
    "_leased_when_marked",
    "acceptance",
    "check",
    "device_model",
    "device_row",
    "devices",
    "host",
    "in_child",
    "invalid",
    "launch",
    "lease",
    "on_device",
    "record_metric",
    "vendor",
    "whole_run",
]
