"""Results and verdicts for tests of the history: one run for each number, each with another id and time."""

import datetime as dt
import json
from typing import Any

import result_files

START = dt.datetime(2026, 1, 1, 2, tzinfo=dt.UTC)
PASSED: dict[str, Any] = {"status": "PASSED", "reasons": [], "failed": [], "warned": []}
GEMM = "test_kernel_speed.py::test_gemm_speed[bf16]"


def failed(*checks: str) -> dict[str, Any]:
    return {
        "status": "FAILED",
        "reasons": [f"{name}: failed" for name in checks],
        "failed": list(checks),
        "warned": [],
    }


def gemm(value: float, m: int = 8192, **changes: Any) -> dict[str, Any]:
    repeats = [value, value * 0.999, value * 1.001]
    facts = {"unit": "TFLOP/s", "repeats": repeats, "conditions": {"devices": 1, "m": m}}
    return result_files.metric("gemm_tflops", value, **facts, **changes)


def result(number: int = 0, *checks: dict[str, Any], model: str = "H200", **changes: Any) -> dict[str, Any]:
    """One run a day: the run of day `number`, on a machine of its own for every third one."""
    started = START + dt.timedelta(days=number)
    host = result_files.host("nvidia", model, driver="580.95.05")
    host["devices"][0]["id"] = f"device{number % 3}"
    if not checks:
        checks = (result_files.check(GEMM, metrics=[gemm(790.0 + number), gemm(780.0, m=4096)]),)
    return result_files.result(
        *checks,
        **{
            "run_id": f"{number:032x}",
            "started": started.isoformat(),
            "finished": (started + dt.timedelta(minutes=5)).isoformat(),
            "stack_id": "cuda13.0-torch2.11.0-py3.12-ubuntu24.04",
            "host": host,
        }
        | changes,
    )


def body(number: int = 0, *checks: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(result(number, *checks, **changes)).encode()
