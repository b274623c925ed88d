"""The fixtures of the acceptance suites. harness/fixtures.py says what each of them means.

Checks carry the marks `gpus(n, perf=…)` and `tier(…)`, and use `on_device`, `launch` and `record_metric`.
"""

from harness.fixtures import (
    _leased_when_marked,
    acceptance,
    check,
    device_model,
    device_row,
    devices,
    host,
    in_child,
    in_new_processes,
    launch,
    lease,
    on_device,
    record_metric,
    vendor,
    whole_run,
)

__all__ = [
    "_leased_when_marked",
    "acceptance",
    "check",
    "device_model",
    "device_row",
    "devices",
    "host",
    "in_child",
    "in_new_processes",
    "launch",
    "lease",
    "on_device",
    "record_metric",
    "vendor",
    "whole_run",
]
