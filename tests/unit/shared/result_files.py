"""A healthy result of schema 1 as plain JSON values, in which a test then breaks one thing."""

import json
from typing import Any

CONFIG_DIGEST = "sha256:" + "c" * 64
DIGEST = "sha256:" + "0" * 64

INTERPRETER = {
    "path": "/opt/venv/bin/python3",
    "file": "/usr/bin/python3.11",
    "sha256": DIGEST,
    "package": "deb:python3.11-minimal 3.11.2-6",
}


THROTTLED = {"kind": "throttled", "words": "device 0 throttled: hardware thermal", "device": 0}


def check(name: str, outcome: str = "passed", **changes: Any) -> dict[str, Any]:
    """A check; an invalid one names throttling, which its readings show."""
    unfit = outcome == "invalid"
    return {
        "id": name,
        "outcome": outcome,
        "reason": None if outcome == "passed" else "because",
        "cause": None,
        "doc": "What it proves.",
        "seconds": 0.5,
        "devices": ["d0"],
        "metrics": [],
        "machine": [THROTTLED] if unfit else [],
        "evidence": {"before": {}, "after": {"0": {"unfit": ["hardware thermal"]}} if unfit else {}},
    } | changes


def metric(name: str = "busbw", value: float | None = 10.0, **changes: Any) -> dict[str, Any]:
    return {
        "name": name,
        "value": value,
        "unit": "GB/s",
        "repeats": [value],
        "conditions": {"bytes": 1024},
        "direction": "min",
        "bound": 5.0,
        "ceiling": None,
        "source": "thresholds/cpu/CPU.json",
        "verdict": "pass",
    } | changes


def host(vendor: str = "cpu", *models: str, driver: str | None = None) -> dict[str, Any]:
    devices = [
        {"model": model, "arch": "", "id": f"d{i}", "memory_bytes": 1, "power_cap_w": None, "firmware": None}
        for i, model in enumerate(models or (("CPU",) if vendor == "cpu" else ()))
    ]
    return {
        "vendor": vendor,
        "devices": devices,
        "driver": driver,
        "kernel": "6.1",
        "partition": None,
        "nvls": "unavailable",
        "cpu": "some x 2",
        "memory_bytes": 1024,
    }


def result(*checks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "run_id": "0123456789abcdef",
        "state": "finished",
        "started": "2026-01-02T03:04:05Z",
        "finished": "2026-01-02T03:05:05Z",
        "tier": "smoke",
        "stack_id": "cpu-torch2.13.0-py3.11-debian12",
        "image": {"reference": "stackcheck/x:1", "config_digest": CONFIG_DIGEST, "manifest_digest": None},
        "inputs": {"suites": DIGEST, "trainers": DIGEST, "thresholds": DIGEST, "matrix": DIGEST},
        "host": host(),
        "interpreter": INTERPRETER,
        "software": {"python": "3.11.2", "torch": "2.13.0+cpu"},
        "environment": {},
        "selection": {"arguments": [], "collected": len(checks), "deselected": 0, "dropped": 0},
        "checks": list(checks),
    } | changes


def told_again(told: dict[str, Any]) -> dict[str, Any]:
    """What a result repeats of run.json, and what healthy suites then see in their container."""
    names = ("run_id", "tier", "stack_id", "image", "inputs", "host", "interpreter")
    return {name: told[name] for name in names} | {
        "seen_devices": [device["id"] for device in told["host"]["devices"]]
    }


def exit_code(text: str | None) -> int:
    """How pytest ends after this result; without one, as a container that was killed."""
    if text is None:
        return 137
    bad = {"failed", "error", "invalid"}
    return int(any(check["outcome"] in bad for check in json.loads(text)["checks"]))


def waiver(name: str, **changes: str) -> dict[str, Any]:
    """A waiver of every stack, as matrix.yaml and a certificate state it."""
    reason = {"reason": "known and harmless", "issue": "pytorch/pytorch#196678", "by": "an owner"}
    return {"check": name, "stacks": ["*"], **reason, "until": "2999-12-31"} | changes
