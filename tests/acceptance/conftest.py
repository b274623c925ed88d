"""The fixtures of the acceptance suites. harness/fixtures.py says what each of them means.

Checks carry the marks `gpus(n, perf=…)` and `tier(…)`, and use `on_device`, `launch` and `record_metric`.
"""

from harness.fixtures import *  # noqa: F403 - pytest finds fixtures by their names here
