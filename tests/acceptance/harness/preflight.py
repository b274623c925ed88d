"""Did the image reach this machine's usual speeds just before a job? In: the preflight of its record. Out:
metrics, or a check that failed.

The job's own product and collectives come from the image. So a slow one is a failure, unless the machine's
state explains it: then the check is invalid.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from harness import thresholds
from harness.check import Check
from harness.evidence import doubts
from harness.session import AcceptanceSession

SLOW_SHARE = 0.9  # of the bound that the checks of kernels and collectives hold the image to


def require_usual(found: Mapping[str, Any], ranks: int, acceptance: AcceptanceSession, check: Check) -> None:
    """Record the speeds that were reached just before the job, and fail if they are too low.
    They are if a product, copy or collective is so slow that the job's figures mean nothing.

    A derived bound says too little for that; the check of the figure itself is judged by it.
    """
    problems = list(found["problems"])
    entries = thresholds.load(thresholds.path_of(acceptance.vendor, acceptance.model))
    for name, value, unit, conditions in ceilings(found):
        check.record(f"preflight_{name}", value, unit=unit, conditions=conditions)
        entry = thresholds.find(entries, name, {"devices": ranks, **conditions})
        if entry is not None and entry.kind != "derived" and not value >= SLOW_SHARE * entry.bound:
            problems.append(f"{name} {value:.4g} {unit} is under 90 % of {entry.bound:g} ({entry.source})")
    require(problems, acceptance, check)


def require(problems: Sequence[str], acceptance: AcceptanceSession, check: Check) -> None:
    """Fail with the problems of a preflight, or end as invalid if the machine's state explains them."""
    if problems:
        start = acceptance.machine_at_start()
        check.doubts += doubts(start, start, acceptance.devices)
        slow = f"preflight: {'; '.join(problems)}"
        check.violations.append(slow)
        check.slow.append(slow)
        check.conclude()


def ceilings(found: Mapping[str, Any]) -> list[tuple[str, float, str, dict[str, Any]]]:
    """Name, value, unit and conditions of each figure, with the metric names of the other suites."""
    shape = ("dtype", "m", "n", "k")
    gemm = [("gemm_tflops", e["tflops"], "TFLOP/s", {key: e[key] for key in shape}) for e in found["gemm"]]
    copy = found["copy"]
    size = {"bytes": copy["bytes"], "kind": "device"}
    return [
        *gemm,
        ("copy_gb_per_s", copy["gb_per_s"], "GB/s", size),
        *(
            (f"{e['op']}_busbw", e["busbw_gb_per_s"], "GB/s", {"bytes": e["bytes"]})
            for e in found["collectives"]
        ),
    ]
