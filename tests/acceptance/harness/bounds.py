"""The rules of thresholds as a program, because stackcheck never imports the suites. In and out: JSON.

stdin: {"model", "entries": [...], "figures": [{"metric", "conditions"}, ...], "devices": N, "nvls": "off",
"tier": "standard", "driver": {"vendor", "driver", "runtime", "serves"} or null,
"drivers": [as driver, ...] or absent}
stdout: {"metrics": {name: {"unit", "direction", "conditions"}},
"ceilings": [the hardware limit of each figure by devices.json, or null],
"reached": [whether a check judges each figure by a bound],
"bounds": [{"bound", "direction", "unit", "class"} of the committed thresholds for each figure, or null],
"missing": [the figures that a run of this tier judges on N devices, and that have no committed bound],
"unmeasured": [the committed bounds for N devices that no figure measures],
"driver": {"state", "says"} of the driver by drivers.json, or null,
"drivers": [the same of each of the drivers],
"lowest_share": the smallest share of its ceiling that a bound may be,
"problems": [what the lint finds wrong with the entries]}.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from harness import models, thresholds
from vendors import drivers
from workloads import gated, speed_conditions

# One way, by generation; PCI Express base specification.
PCIE_GB_PER_S_A_LANE = {3: 0.985, 4: 1.969, 5: 3.938}

NVLS = ("on", "off", "unavailable")
BETWEEN_DEVICES = ("_busbw", "_latency_us", "p2p_gb_per_s")  # what one device has nothing to measure of


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
        "bounds": [bound(row, figure["metric"], figure["conditions"]) for figure in asked["figures"]],
        "missing": missing(row, asked.get("devices"), asked.get("tier")),
        "unmeasured": unmeasured(row, asked),
        "driver": support(asked.get("driver")),
        "lowest_share": thresholds.LOWEST_SHARE,
        "problems": list(thresholds.lint(asked["entries"])),
    }
    if "drivers" in asked:
        answer["drivers"] = [support(one) for one in asked["drivers"]]
    json.dump(answer, sys.stdout, allow_nan=False)


def support(asked: Mapping[str, str | None] | None) -> dict[str, str] | None:
    """What the documents say about a driver; None for a CPU, or if the run did not tell its runtime."""
    if not asked or not asked["runtime"]:
        return None
    driver, runtime = asked["driver"], asked["runtime"]
    found = (
        drivers.amd(driver, runtime)
        if asked["vendor"] == "amd"
        else drivers.nvidia(driver, runtime, asked["serves"])
    )
    return vars(found).copy()


def bound(row: Mapping[str, Any], metric: str, conditions: Mapping[str, Any]) -> dict[str, Any] | None:
    """The committed bound of a figure on this device model; None if there is none."""
    entry = thresholds.find(_committed(row), metric, conditions)
    if entry is None:
        return None
    return {
        "bound": entry.bound,
        "direction": entry.direction,
        "unit": entry.unit,
        "class": entry.kind,
    }


def missing(row: Mapping[str, Any], devices: int | None, tier: str | None = "standard") -> list[str]:
    """The figures that a run of this tier judges on so many devices of a model, and that have no bound.

    A machine can certify only if there are none, in any state of NVLink multicast. Nobody asked: none.
    """
    if not devices or not tier:
        return []
    entries = _committed(row)
    return [
        f"{metric} with {json.dumps(conditions, sort_keys=True)}"
        for metric, conditions in gated.figures(row, devices, tier)
        if any(
            thresholds.find(entries, metric, {"devices": 1, **conditions, "nvls": state}) is None
            for state in NVLS
        )
    ]


def unmeasured(row: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """The committed bounds that a run of this tier on so many devices has to measure, and no figure does."""
    devices, nvls, figures = asked.get("devices"), asked.get("nvls"), asked["figures"]
    soak = asked.get("tier") == "soak"
    return [
        f"{entry.metric} with {json.dumps(entry.conditions, sort_keys=True)}"
        for entry in _committed(row)
        if entry.conditions.get("devices", devices) == devices
        and not (devices == 1 and entry.metric.endswith(BETWEEN_DEVICES))
        and entry.conditions.get("nvls", nvls) == nvls
        and (soak or not speed_conditions.needs_soak(entry.metric, entry.conditions))
        and not any(entry.holds_for(figure["metric"], figure["conditions"]) for figure in figures)
    ]


def _committed(row: Mapping[str, Any]) -> tuple[thresholds.Threshold, ...]:
    return thresholds.load(thresholds.path_of(row["vendor"], row["model"]))


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
