"""What `fleet run` writes, for the page: four nodes in two racks, a bad link, a node lost while training."""

import datetime as dt
import json
from pathlib import Path
from typing import Any

BAD_CHECK = "test_kernels.py::test_gemm_values[bf16]"
CHECKS = ("test_devices.py::test_device_count", BAD_CHECK, "test_collectives.py::test_all_reduce")
NOW = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)


def document(count: int = 4, *, links: bool = True) -> dict[str, Any]:
    """The last node fails; like every other one it is in the second of two racks."""
    nodes = [_node(number, failed=number == count) for number in range(1, count + 1)]
    return {
        "job": {
            "id": "fleet0",
            "name": "cpu-torch2.13.0-py3.11-debian12",
            "engine": "slurm",
            "tier": "standard",
            "only": None,
            "nodes": count,
            "created": NOW.isoformat(),
        },
        "status": "FAILED",
        "nodes": nodes[::-1],
        "stragglers": [
            {
                "node": "node2",
                "check": CHECKS[1],
                "metric": "gemm_tflops",
                "unit": "TFLOP/s",
                "value": 612.0,
                "median": 701.5,
                "z": 9.1,
                "loss": 0.128,
            }
        ],
        "links": _links() if links else None,
        "training": {
            "nodes": ["node1", "node2", "node3"],
            "ranks_of_a_node": 2,
            "lost": [
                {"node": "node4", "because": "the engine says that the node is down", "at_step": {"fsdp": 20}}
            ],
            "errors": [],
            "layouts": {"fsdp": {"first_step": 20, "losses": [5.1, 4.9]}},
        },
    }


def _node(number: int, *, failed: bool) -> dict[str, Any]:
    return {
        "node": f"node{number}",
        "rack": f"rack{1 if number % 2 else 2}",
        "partition": "small",
        "status": "FAILED" if failed else "PASSED",
        "reasons": [f"{BAD_CHECK} failed: 3 of 4096 elements differ"] if failed else [],
        "devices": ["CPU"],
        "checks": dict.fromkeys(CHECKS, "passed") | ({BAD_CHECK: "failed"} if failed else {}),
    }


def _links() -> dict[str, Any]:
    speed = {("node1", "node2"): 0.04, ("node1", "node3"): 0.83, ("node2", "node3"): 0.81}
    because = "0.04 GB/s, less than a third of the median, 0.81 GB/s"
    return {
        "pairs": [[*pair, value] for pair, value in speed.items()],
        "failed": [],
        "culprits": [{"kind": "link", "names": ["node1", "node2"], "because": because}],
        "whole_gb_per_s": 0.05,
        "whole_error": None,
    }


def write(root: Path, made: dict[str, Any], *, age_days: int) -> None:
    job = made["job"] | {"id": f"fleet{age_days}", "created": (NOW - dt.timedelta(days=age_days)).isoformat()}
    folder = root / "build" / "fleet" / job["id"]
    folder.mkdir(parents=True)
    (folder / "fleet.json").write_text(json.dumps(made | {"job": job}))
