"""`pytest tests/ --gpu-vendor amd` whole, on a fabricated host. In: a state and faults. Out: its result.

The host has a Python with PyTorch's build for processors, Triton, AMD's own management library, and the
stand-ins for HIP and RCCL. fakeamd/whole/standins.py decides what runs; needs.json says why the rest cannot.
"""

import fnmatch
import importlib.metadata
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakehip
from fakeamd import host, interpreter, rootfs
from fakeamd.states import STATES
from test_amd_hosts import HERE, HIP, NEW, TESTS, listed

COMMAND = ("python3", "-m", "pytest", "/stackcheck/tests", "--gpu-vendor", "amd")
TRAINERS = TESTS.parent / "trainers"
FABRICATED = HERE / "fakeamd"
NEEDS = json.loads((FABRICATED / "whole/needs.json").read_text(encoding="utf-8"))
SMI = "usr/lib/python3/dist-packages/amdsmi"  # of the root: it belongs to another Python there
DECLARED = "/stackcheck/declared"
STACK = f"rocm{HIP}-torch2.13.0-py3.11-debian"
ARCHS = ("gfx90a", "gfx942", "gfx950")
OPTIONS = (
    *("-p", "no:cacheprovider", "-p", "no:xdist"),
    *("--result-dir", "/stackcheck/out", "--lease-dir", "/tmp/leases"),
)
TIMEOUT_S = 1500  # three of these at once, beside other tests, on two cores


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is wrong: the host's state, a fault of HIP or RCCL, a torch that is not for ROCm, a package."""

    state: str
    fault: str = ""
    hip: str | None = HIP  # the release that torch names
    packages: Mapping[str, str] | None = None  # declared versions that are not the installed ones


def run(planted: Planted, folder: Path, kept: Path) -> Mapping[str, Any]:
    """result.json of the command, its checks by id, and its output. What Triton compiles stays in `kept`."""
    python = interpreter.found()
    out, declared, hip = (folder / name for name in ("out", "declared", "hip"))
    for made in (out, declared, hip, kept / "triton"):
        made.mkdir(parents=True, exist_ok=True)
    fakehip.build(hip)
    _declare(declared, python, planted.packages or {})
    done = host.run(
        STATES[planted.state],
        NEW,
        COMMAND,
        binds={
            "tests": TESTS,
            "trainers": TRAINERS,
            "inside": FABRICATED / "inside",
            "whole": FABRICATED / "whole",
            "hip": hip,
            "smi": _smi(),
            "declared": declared,
            "out": out,
            "out/triton": kept / "triton",
            **python.binds,
        },
        over=python.over(planted.hip, folder) if planted.hip else {},
        writable=("out", "out/triton"),
        environment=_environment(planted),
        timeout_s=TIMEOUT_S,
    )
    assert (out / "result.json").exists(), done.stdout
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    checks = {check["id"]: check for check in result["checks"]}
    return {**result, "checks": checks, "exit": done.returncode, "output": done.stdout}


def _environment(planted: Planted) -> dict[str, str]:
    bin_folder = f"/stackcheck/{interpreter.SKELETON}/bin"
    return {
        "PATH": f"{bin_folder}:/usr/bin:/usr/sbin",
        "LD_LIBRARY_PATH": "/stackcheck/python/lib",  # of an interpreter that is linked with its library
        "PYTHONPATH": "/stackcheck/whole:/stackcheck/smi:/stackcheck/tests/acceptance",
        "PYTEST_PLUGINS": "standins",
        "PYTEST_ADDOPTS": " ".join(OPTIONS),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "STACKCHECK_STACK_FILE": f"{DECLARED}/stack.json",
        "PIP_CONSTRAINT": f"{DECLARED}/constraints.txt",
        "FAKEAMD_HIP": HIP,
        "FAKEHIP": f"/stackcheck/hip/{fakehip.NAMES[0]}",
        "FAKEHIP_DEVICES": listed(planted.state, planted.fault),
        "FAKEHIP_FAULT": planted.fault,
    }


def _declare(folder: Path, python: interpreter.Interpreter, changed: Mapping[str, str]) -> None:
    """The declaration that an image of this stack would have."""
    installed = {
        one.name: one.version for one in importlib.metadata.distributions(path=[str(python.packages)])
    }
    packages = {name: installed[name] for name in ("torch", "triton", "pytest")}
    declaration = {
        "stack_id": STACK,
        "vendor": "amd",
        "python": python.release,
        "os": "debian",
        "wheels": "pytorch",
        "runtime_version": HIP,
        "triton": {"version": packages["triton"]},
        "archs": ARCHS,
        "env": {"PIP_CONSTRAINT": f"{DECLARED}/constraints.txt"},
        "packages": {**packages, **changed},
    }
    (folder / "stack.json").write_text(json.dumps(declaration), encoding="utf-8")
    constraints = "".join(f"{name}=={packages[name]}\n" for name in ("torch", "triton"))
    (folder / "constraints.txt").write_text(constraints, encoding="utf-8")


def _smi() -> Path:
    """A folder with AMD's own module alone, for the path of another Python than the root's."""
    folder = rootfs.CACHE / f"smi-{NEW.suite}"
    if not (folder / "amdsmi").exists():
        shutil.copytree(rootfs.ensure(NEW) / SMI, folder / "amdsmi", dirs_exist_ok=True)
    return folder


def needs(check: str) -> str | None:
    """The key in needs.json of what a check lacks on a fabricated host; None if it runs there."""
    keys = [
        key for key, one in NEEDS.items() if any(fnmatch.fnmatchcase(check, name) for name in one["checks"])
    ]
    assert len(keys) < 2, f"{check} is listed under {keys}"
    return keys[0] if keys else None
