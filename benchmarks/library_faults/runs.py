"""One run of acceptance checks with faults inside the libraries. In: checks, a setting for each.
Out: what they said.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import planned
from planned import Setting

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Machine:
    """Where the checks run, and the shim that was compiled for it."""

    vendor: str
    shim: Path
    variables: Mapping[str, str]


def made(vendor: str, out: Path) -> Machine:
    """Compile the shim, and on GPUs its kernel, for this machine's torch."""
    shim, kernel = planned.compiled(out), (out / "edit.ptx").resolve()
    if vendor == "cpu":
        return Machine(vendor, shim, {})
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # its context would be a neighbour
        kernel.write_bytes(pool.submit(ptx, (HERE / "edit.cu").read_bytes()).result())
    return Machine(vendor, shim, {"FAULT_KERNEL": str(kernel)})


def ptx(source: bytes) -> bytes:
    """PTX of CUDA C, by the NVRTC that torch brings."""
    import torch

    torch.zeros(1, device="cuda")
    places = [Path(torch.__file__).parents[1] / "nvidia", Path("/usr/local/cuda/lib64")]
    path = next(path for place in places for path in sorted(place.rglob("libnvrtc.so.*")))
    nvrtc = ctypes.CDLL(str(path))
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    checked(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"edit.cu", 0, None, None))
    major, _ = torch.cuda.get_device_capability()
    option = (ctypes.c_char_p * 1)(f"--gpu-architecture=compute_{major}0".encode())
    checked(nvrtc.nvrtcCompileProgram(program, 1, option))
    checked(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)))
    text = ctypes.create_string_buffer(size.value)
    checked(nvrtc.nvrtcGetPTX(program, text))
    return text.raw.rstrip(b"\0")


def checked(answer: int) -> None:
    """Raise `RuntimeError` if NVRTC did not answer with 0."""
    if answer:
        raise RuntimeError(f"NVRTC answered {answer}")


def run(
    name: str,
    checks: Sequence[str],
    settings: Mapping[str, Setting],
    machine: Machine,
    *,
    out: Path,
    variables: Mapping[str, str] | None = None,
    timeout_s: float = 400,
) -> dict[str, Any]:
    """One run: outcome, calls and gated figures by check. `checks` are pytest's words that choose them."""
    folder = out / re.sub(r"\W+", "-", name)
    plan, record = planned.plan(folder, machine.shim, settings), folder / "record.json"
    asked = {"checks": list(checks), "plan": plan}
    if record.exists() and covers((kept := json.loads(record.read_text(encoding="utf-8")))["asked"], asked):
        by_check = {check: Counter(of) for check, of in kept["found"]["by_check"].items()}
        return {**kept["found"], "by_check": by_check}
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    variables = {**planned.write_plan(folder, plan), **(variables or {})}
    command = (sys.executable, "-m", "pytest", *checks, "--gpu-vendor", machine.vendor, "--tier", "standard")
    command += ("--result-dir", str(folder / "results"), "-p", "planned", "-p", "no:cacheprovider", "-q")
    command += () if name.startswith("speed") or machine.vendor == "cpu" else ("-n", "8")
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    begun = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **machine.variables, **variables, "PYTHONPATH": path},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=timeout_s,
            check=False,
        )
    found = {"seconds": time.monotonic() - begun, **told(folder)}
    record.write_text(json.dumps({"asked": asked, "found": found}), encoding="utf-8")
    return found


def covers(made: Mapping[str, Any], asked: Mapping[str, Any]) -> bool:
    """Whether a run had all that is asked: the same shim and folder, these checks, these settings."""
    plan, wanted = dict(made["plan"]), dict(asked["plan"])
    settings, same = plan.pop("settings"), wanted.pop("settings").items()
    return (
        plan == wanted
        and {*asked["checks"]} <= {*made["checks"]}
        and all(settings.get(c) == s for c, s in same)
    )


def told(folder: Path) -> dict[str, Any]:
    """What a run left: outcome, calls and gated figures by check."""
    checks = json.loads((folder / "results/result.json").read_text(encoding="utf-8"))["checks"]
    counts = planned.counts(folder)
    outcomes = {check["id"]: check["outcome"] for check in checks}
    return {
        "calls": sum(of.total() - of["changed"] for of in counts.values()),
        "changed": sum(of["changed"] for of in counts.values()),
        "by_check": counts,
        "counts": dict(sorted(Counter(outcomes.values()).items())),
        "outcomes": outcomes,
        "lasted": {check["id"]: check["seconds"] or 0.0 for check in checks},
        "figures": {
            f"{check['id']} {metric['name']} {json.dumps(metric['conditions'], sort_keys=True)}": metric[
                "value"
            ]
            for check in checks
            for metric in check["metrics"]
            if "/s" in metric["unit"]
        },
    }
