"""The writer of result.json, schema 1. In: the records of checks as they end. Out: one file, always complete.

`state` is "running" from before the first check on, so that the file of a run that dies shows it; "crashed"
if pytest was interrupted; "finished" only after a normal end.
"""

import datetime as dt
import hashlib
import json
import os
import platform
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from harness import about, asked, models, processes
from vendors import Absence, Device, Host, VendorName, cpu, multicast

TESTS = Path(__file__).resolve().parent.parent.parent
WRITE_PERIOD_S = 1.0
ENVIRONMENT = (
    *("NCCL_", "RCCL_", "TORCH_", "PYTORCH_", "HSA_", "HIP_", "ROCR_", "CUDA_", "GPU_", "MIOPEN_"),
    *("NVIDIA_", "AMD_", "MSCCL", "TRITON_", "FLASH_ATTENTION_", "OMP_", "UCX_", "GLOO_", "LD_LIBRARY_PATH"),
)


class ResultFile:
    """The result.json of one run."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.content: dict[str, Any] = {**head, "checks": []}
        self._written = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.write()

    def add(self, record: Mapping[str, Any]) -> None:
        """Add the record of a check. The file is written at most once a second."""
        self.content["checks"].append(dict(record))
        if time.monotonic() - self._written > WRITE_PERIOD_S:
            self.write()

    def finish(self, *, crashed: bool, selection: Mapping[str, Any]) -> None:
        """Write the end of the run."""
        self.content |= {"state": "crashed" if crashed else "finished", "finished": now()}
        self.content["selection"] |= selection
        self.write()

    def write(self) -> None:
        """Replace the file atomically."""
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(self.content, indent=1, allow_nan=False), encoding="utf-8")
        partial.replace(self.path)
        self._written = time.monotonic()


def now() -> str:
    """The current time in UTC, in RFC 3339 format."""
    return dt.datetime.now(dt.timezone.utc).isoformat(timespec="milliseconds")


def head(
    *,
    vendor: VendorName,
    tier: str,
    run_id: str,
    run_file: Mapping[str, Any],
    host: Host | None,
    arguments: list[str],
) -> dict[str, Any]:
    """Everything but the checks. A fact from run.json replaces what this process can find out."""
    variables = processes.variables()
    return {
        "schema": 1,
        "run_id": run_id,
        "state": "running",
        "started": now(),
        "finished": None,
        "tier": tier,
        "stack_id": run_file.get("stack_id"),
        "image": run_file.get("image"),
        "inputs": run_file.get("inputs") or inputs(),
        "host": run_file.get("host") or describe(vendor, host),
        "seen_devices": [anonymous(device.uuid) for device in host.devices] if host else [],
        "interpreter": interpreter(run_file),
        "software": asked.of_image(about.software),
        "environment": {
            name: value for name, value in sorted(variables.items()) if name.startswith(ENVIRONMENT)
        },
        "selection": {"arguments": arguments, "collected": 0, "deselected": 0, "dropped": 0},
    }


def interpreter(run_file: Mapping[str, Any]) -> dict[str, Any]:
    """The Python that runs the children. Only the host knows which package of the image owns it."""
    container = processes.container()
    found = about.interpreter() if container is None else container.interpreter
    told = run_file.get("interpreter") or {}
    libraries = {"libraries": told["libraries"]} if told.get("libraries") else {}
    return {**found, "package": told.get("package"), **libraries}


def inputs() -> dict[str, str | None]:
    """Digests of suites, trainers and thresholds, computed as stackcheck does for its frozen copy."""
    bounds, trainers = TESTS / "acceptance" / "thresholds", TESTS.parent / "trainers"
    suites = [TESTS / "conftest.py", TESTS / "pytest.ini", *_files(TESTS / "acceptance", without=bounds)]
    return {
        "suites": _digest(suites),
        "trainers": _digest(_files(trainers, without=trainers / "tools")),
        "thresholds": _digest(_files(bounds)),
        "matrix": None,
        "runner": None,
    }


def describe(vendor: VendorName, host: Host | None) -> dict[str, Any]:
    """The `host` object of result.json, for a run whose run.json has none."""
    devices = host.devices if host else ()
    partitions = sorted(
        {"/".join(map(str, device.partition.values())) for device in devices if device.partition}
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "vendor": vendor,
        "devices": [_device(vendor, device) for device in devices],
        "driver": str(host.driver) if host and not isinstance(host.driver, Absence) else None,
        "kernel": platform.release(),
        "partition": ", ".join(partitions) or None,
        "nvls": multicast.state(vendor, len(devices)),
        "cpu": f"{cpu.processor()} x {os.cpu_count()}",
        "memory_bytes": memory,
    }


def model_of(vendor: VendorName, device: Device) -> str:
    """The device model, or a text for an unknown one."""
    try:
        return str(models.identify(vendor, device)["model"])
    except models.UnknownDeviceError:
        return f"unknown (PCI {device.pci_id})"


def anonymous(uuid: str) -> str:
    """A stable name for a device, from which its UUID cannot be read."""
    return hashlib.sha256(uuid.encode()).hexdigest()[:16]


def _device(vendor: VendorName, device: Device) -> dict[str, Any]:
    cap, vbios = device.power.cap_w, device.firmware.get("vbios")
    return {
        "model": model_of(vendor, device),
        "arch": device.arch,
        "id": anonymous(device.uuid),
        "memory_bytes": device.memory_bytes,
        "power_cap_w": None if isinstance(cap, Absence) else float(cap),
        "firmware": None if vbios is None or isinstance(vbios, Absence) else str(vbios),
    }


def _files(folder: Path, without: Path | None = None) -> list[Path]:
    """The files below a folder that count, but for those of the folder `without`."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [name for name in folders if _counts(name) and here / name != without]
        paths = (here / name for name in names if _counts(name) and not name.endswith(".pyc"))
        found += [path for path in paths if path.is_file()]
    return found


def _counts(name: str) -> bool:
    return not name.startswith(".") and name != "__pycache__"


def _digest(files: Iterable[Path]) -> str:
    start = len(f"{TESTS.parent}{os.sep}")
    lines = sorted(
        f"{str(path)[start:].replace(os.sep, '/')} sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in files
    )
    return "sha256:" + hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_run_file(path: Path | None) -> dict[str, Any]:
    """The facts in --run-file about the image and the run; empty without that option."""
    if path is None:
        return {}
    try:
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"--run-file {path}: {error}") from error
    return facts
