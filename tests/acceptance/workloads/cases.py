"""Run the named cases of one check.
In: `(name, function)` pairs; each function returns the readings of its case.

Out: a JSON object `{"cases": [{"name", "failures": [...], "margin"}]}`, which a check passes to `require`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from workloads import device, margins
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
    return {
        "name": name,
        "failures": [str(reading) for reading in readings if not reading.passed],
        "margin": margins.worst(reading.margin for reading in readings),
    }


def thorough(tier: str) -> bool:
    """Whether to run every shape: a GPU needs seconds for them, a CPU would need hours."""
    return tier != "smoke" and device().type == "cuda"


def require(report: Mapping[str, Any], record_metric: margins.Record) -> None:
    """Record how near the cases came to their gates, and fail with every failing case and its numbers.

    A report without cases fails, and so does a case that calls itself passed beyond its gate.
    """
    cases = report["cases"]
    if not cases:  # raised, not asserted: pytest does not rewrite asserts here, and -O removes them
        raise AssertionError("no case ran, so nothing was proven")
    margins.record(record_metric, margins.worst(case["margin"] for case in cases), len(cases))
    failing = {case["name"]: case["failures"] for case in cases}
    for case in cases:
        if not case["failures"] and not case["margin"] <= 1:
            failing[case["name"]] = [f"margin: got {case['margin']:.4g}, bound 1"]
    lines = [f"  {name}: {failure}" for name, failures in failing.items() for failure in failures]
    if lines:
        count = sum(bool(failures) for failures in failing.values())
        raise AssertionError("\n".join([f"{count} of {len(cases)} cases failed", *lines]))
