"""Run the named cases of one check. In: `(name, function)` pairs; each function returns the readings of its
case.

Out: a JSON object `{"cases": [{"name", "failures": [...], "margin"}]}`, which a check passes to `require`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workloads import device
from workloads.gates import Reading

Case = tuple[str, Callable[[], Iterable[Reading]]]


def run(cases: Iterable[Case]) -> dict[str, Any]:
    """Run every case, even after a failure: the set of failing shapes shows more than the first one."""
    return {"cases": [_run_one(name, function) for name, function in cases]}


def _run_one(name: str, function: Callable[[], Iterable[Reading]]) -> dict[str, Any]:
    try:
        readings = tuple(function())
    except Exception as error:
        raise RuntimeError(f"case {name} raised {type(error).__name__}: {error}") from error
    if not readings:
        raise RuntimeError(f"case {name} has no reading: a case without a gate proves nothing")
    margins = [
        reading.got / reading.bound for reading in readings if reading.bound and math.isfinite(reading.got)
    ]
    return {
        "name": name,
        "failures": [str(reading) for reading in readings if not reading.passed],
        "margin": max(margins, default=0.0),
    }


def thorough(tier: str) -> bool:
    """Whether to run every shape: a GPU needs seconds for them, a CPU would need hours."""
    return tier != "smoke" and device().type == "cuda"


def require(report: Mapping[str, Any]) -> None:
    """Fail with every failing case and its numbers; a report without cases fails too."""
    cases = report["cases"]
    if not cases:  # raised, not asserted: pytest does not rewrite asserts here, and -O removes them
        raise AssertionError("no case ran, so nothing was proven")
    failing = [case for case in cases if case["failures"]]
    lines = [f"  {case['name']}: {failure}" for case in failing for failure in case["failures"]]
    if failing:
        raise AssertionError("\n".join([f"{len(failing)} of {len(cases)} cases failed", *lines]))
