"""The rules of thresholds as a program, because stackcheck never imports the suites. In and out: JSON.

stdin: {"model", "entries": [...], "figures": [{"metric", "conditions"}, ...]}
stdout: {"metrics": {name: {"unit", "direction", "conditions"}},
"ceilings": [the hardware limit of each figure by devices.json, or null],
"reached": [whether a check judges each figure by a bound],
"lowest_share": the smallest share of its ceiling that a bound may be,
"problems": [what the lint finds wrong with the entries]}.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from harness import models, thresholds
from workloads import speed_conditions

# One way, by generation; PCI Express base specification.
PCIE_GB_PER_S_A_LANE = {3: 0.985, 4: 1.969, 5: 3.938}


def main() -> None:
    asked = json.load(sys.stdin)
    row = models.row(asked["model"])
    answer = {
        "metrics": {
            name: {"unit": unit, "direction": direction, "conditions": sorted(conditions)}
            for name, (unit, direction, conditions) in thresholds.METRICS.items()
        },
        "ceilings": [ceiling(row, figure["metric"], figure["conditions"]) for figure in asked["figures"]],
        "reached": [
            speed_conditions.reaches(figure["metric"], figure["conditions"]) for figure in asked["figures"]
        ],
        "lowest_share": thresholds.LOWEST_SHARE,
        "problems": list(thresholds.lint(asked["entries"])),
    }
    json.dump(answer, sys.stdout, allow_nan=False)


def ceiling(row: Mapping[str, Any], metric: str, conditions: Mapping[str, Any]) -> float | None:
    """What the hardware cannot exceed, in the metric's unit; None if its datasheet has no such figure."""
    if metric.endswith("_tflops"):
        peak: float | None = row["peak_tflops"].get(conditions.get("dtype", "bf16"))
        return peak
    if metric == "copy_gb_per_s":
        memory: float | None = row["memory_gb_per_s"]
        return memory
    if metric.endswith("_busbw") and conditions.get("nvls") != "on":  # multicast can exceed the wire
        return _wire(row)
    if metric in {"h2d_gb_per_s", "d2h_gb_per_s"} and row["pcie"]:
        return PCIE_GB_PER_S_A_LANE[row["pcie"]["generation"]] * int(row["pcie"]["width"])
    return _wire(row) if metric == "p2p_gb_per_s" else None


def _wire(row: Mapping[str, Any]) -> float | None:
    """GB/s one way out of one device. devices.json has NVLink's total, and xGMI's rate per link."""
    link = row["link"]
    if link is None:
        return None
    return float(link["gb_per_s_one_way"] * (1 if link["kind"] == "nvlink" else link["links"]))


if __name__ == "__main__":
    main()
