"""The rules of thresholds as a program, because stackcheck never imports the suites. In and out: JSON.

stdin: {"model", "entries": [...], "figures": [{"metric", "conditions"}, ...], "devices": N, "nvls": "off",
"tier": "standard", "torch": "2.11.0" or null, "driver": {"vendor", "driver", "runtime", "serves"} or null,
"drivers": [as driver, ...] or absent, "skipped": [ids of the checks that were skipped] or absent}
stdout: {"metrics": {name: {"unit", "direction", "conditions"}},
"ceilings": [the hardware limit of each figure by devices.json, or null],
"reached": [whether a check judges each figure by a bound],
"bounds": [{"bound", "direction", "unit", "class"} of the committed thresholds for each figure, or null],
"defaults": [why the backend that attention took by default is not the one that it has to be],
"missing": [the figures that a run of this tier judges on N devices, and that have no committed bound],
"unmeasured": [the committed bounds for N devices that no figure measures],
"driver": {"state", "says"} of the driver by drivers.json, or null,
"drivers": [the same of each of the drivers],
"lowest_share": the smallest share of its ceiling that a bound may be,
"problems": [what the lint finds wrong with the entries],
"limits_are_guessed": whether the limits of time on this vendor are a multiple of those that were measured}.
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

import vendors
from harness import models, thresholds
from vendors import drivers
from workloads import attention_default, gated, speed_conditions

NVLS = ("on", "off", "unavailable")
BETWEEN_DEVICES = ("_busbw", "_latency_us", "p2p_gb_per_s")  # what one device has nothing to measure of


def main() -> None:
    asked = json.load(sys.stdin)
    row = models.row(asked["model"])
    figures: list[dict[str, Any]] = asked["figures"]
    defaults: list[str] = []
    if "torch" in asked:  # a verdict; a baseline takes no figure of the default
        cuda = (asked.get("driver") or {}).get("runtime") if row["vendor"] == "nvidia" else None
        wanted = attention_default.expected(row["arch"], asked["torch"], cuda)
        figures, defaults = resolved(figures, wanted)
        asked["figures"] = figures
    answer = {
        "metrics": {
            name: {"unit": unit, "direction": direction, "conditions": sorted(conditions)}
            for name, (unit, direction, conditions) in thresholds.METRICS.items()
        },
        "ceilings": [ceiling(row, figure["metric"], figure["conditions"]) for figure in figures],
        "reached": [speed_conditions.reaches(figure["metric"], figure["conditions"]) for figure in figures],
        "bounds": [bound(row, figure["metric"], figure["conditions"]) for figure in figures],
        "defaults": defaults,
        "missing": missing(row, asked.get("devices"), asked.get("tier")),
        "unmeasured": unmeasured(row, asked),
        "driver": support(asked.get("driver")),
        "lowest_share": thresholds.LOWEST_SHARE,
        "problems": list(thresholds.lint(asked["entries"])),
        "limits_are_guessed": vendors.module(row["vendor"]).TIME_LIMIT_FACTOR != 1,
    }
    if "drivers" in asked:
        answer["drivers"] = [support(one) for one in asked["drivers"]]
    json.dump(answer, sys.stdout, allow_nan=False)


def resolved(figures: list[dict[str, Any]], wanted: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The figures, each of the default as one of the wanted backend; and where a run says another."""
    found, problems = [], []
    for figure in figures:
        conditions = figure["conditions"]
        if conditions.get("backend") == attention_default.DEFAULT:
            # Runs before it was recorded do not say.
            said = conditions.get(attention_default.RESOLVED, wanted)
            if said != wanted:
                problems.append(
                    f"{figure['metric']}: attention took {said or 'no known backend'} by default, and"
                    f" with this torch on this device it takes {wanted} (workloads/attention_default.py)"
                )
            figure = {**figure, "conditions": {**conditions, attention_default.RESOLVED: wanted}}  # noqa: PLW2901
        found.append(figure)
    return found, problems


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
    """The committed bound of a figure on this device model; `None` if it has no bound."""
    entry = thresholds.find(_committed(row), metric, conditions)
    if entry is None:
        return None
    return {"bound": entry.bound, "direction": entry.direction, "unit": entry.unit, "class": entry.kind}


def missing(row: Mapping[str, Any], devices: int | None, tier: str | None = "standard") -> list[str]:
    """The figures without a bound that a run of this tier judges on `devices` devices of a model.

    A machine can certify only if this list is empty, in any state of NVLink multicast. It is also empty if
    `devices` or `tier` is not given.
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
    """The committed bounds that a run of this tier on these devices has to measure, but did not."""
    devices, nvls, figures = asked.get("devices"), asked.get("nvls"), asked["figures"]
    soak = asked.get("tier") == "soak"
    absent = speed_conditions.OPTIONAL_CHECK in asked.get("skipped", ())  # the judge confirms the skip
    named = {figure["metric"] for figure in figures if attention_default.RESOLVED in figure["conditions"]}
    unnamed = [metric for metric in gated.ATTENTION if metric not in named and _committed(row)]
    return [f"{metric} of the default backend" for metric in unnamed] + [
        f"{entry.metric} with {json.dumps(entry.conditions, sort_keys=True)}"
        for entry in _committed(row)
        if entry.conditions.get("devices", devices) == devices
        and not (devices == 1 and entry.metric.endswith(BETWEEN_DEVICES))
        and entry.conditions.get("nvls", nvls) == nvls
        and (soak or not speed_conditions.needs_soak(entry.metric, entry.conditions))
        and not (absent and speed_conditions.is_optional(entry.metric, entry.conditions))
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
        return thresholds.PCIE_GB_PER_S_A_LANE[row["pcie"]["generation"]] * int(row["pcie"]["width"])
    return _wire(row) if metric == "p2p_gb_per_s" else None


def _wire(row: Mapping[str, Any]) -> float | None:
    """GB/s one way out of one device. devices.json has NVLink's total, and xGMI's rate per link."""
    link = row["link"]
    if link is None:
        return None
    return float(link["gb_per_s_one_way"] * (1 if link["kind"] == "nvlink" else link["links"]))


if __name__ == "__main__":
    main()
