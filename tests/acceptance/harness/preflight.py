"""Was the machine fit just before a training job? In: the preflight of its record. Out: metrics, or an
invalid check.
"""

from collections.abc import Mapping
from typing import Any

from harness import thresholds
from harness.check import invalid
from harness.fixtures import RecordMetric
from harness.session import AcceptanceSession

UNFIT_SHARE = 0.9  # of the bound that the checks of kernels and collectives hold the image to


def keep(found: Mapping[str, Any], record_metric: RecordMetric) -> None:
    """Record the speeds that the machine reached just before the job."""
    for name, value, unit, conditions in ceilings(found):
        record_metric(f"preflight_{name}", value, unit=unit, conditions=conditions)


def require_fit(found: Mapping[str, Any], ranks: int, acceptance: AcceptanceSession) -> None:
    """End the check as invalid if the machine is so slow that its figures say nothing about the image."""
    problems = list(found["problems"])
    entries = thresholds.load(thresholds.path_of(acceptance.vendor, acceptance.model))
    for name, value, unit, conditions in ceilings(found):
        entry = thresholds.find(entries, name, {"devices": ranks, **conditions})
        if entry is not None and not value >= UNFIT_SHARE * entry.bound:
            problems.append(f"{name} {value:.4g} {unit} is under 90 % of {entry.bound:g} ({entry.source})")
    if problems:
        invalid(f"preflight: {'; '.join(problems)}")


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
