"""What one Triton release makes of the project's kernels. In: nothing; this Python has that release and no
torch. Out: a JSON line, {"version", "tiles": {"kernel arch dtype block": facts}, "kernels": {"name arch":
error or null}}.

Run by test_triton_releases.py in an environment of its own for each release.
"""

import importlib.util
import json
import sys
import types
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests/acceptance"))

import triton  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from workloads import machine_code  # noqa: E402

ARCHS = ("gfx90a", "gfx942", "gfx950", "sm_80", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
FP8 = {"gfx942": "fp8e4b8"} | dict.fromkeys(
    ("gfx950", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120"), "fp8e4nv"
)
B, F, I = "*bf16", "*fp32", "i32"  # noqa: E741 - three columns of one table
# Kernel of trainers/fused/triton_ops.py -> its arguments' types, its constants for Llama 8B, its warps.
KERNELS = {
    "_add_norm": (
        {"x": B, "y": B, "w": B, "s": B, "h": B, "rstd": F, "amax": F, "eps": "fp32"},
        {"D": 4096, "B": 4096, "ADD": True, "AMAX": True},
        8,
    ),
    "_norm_apply": ({"s": B, "rstd": F, "w": B, "h": B}, {"D": 4096, "B": 4096}, 8),
    "_norm_backward": (
        {"dh": B, "s": B, "rstd": F, "w": B, "residual": B, "ds": B, "dw": F, "rows": I},
        {"P": 528, "PER": 16, "D": 4096, "B": 4096},
        8,
    ),
    "_rope": ({"x": B, "cos": F, "sin": F, "S": I, "row_stride": I}, {"HALF": 64, "HEADS": 8}, 4),
    "_rope_backward": (
        {"dq": B, "dk": B, "dv": B, "cos": F, "sin": F, "out": B, "S": I},
        {"Q": 32, "KV": 8, "HALF": 64, "P": 32},
        8,
    ),
    "_swiglu": ({"gu": B, "a": B, "amax": F, "F": I}, {"B": 2048, "AMAX": True}, 8),
    "_swiglu_backward": ({"da": B, "gu": B, "a": B, "amax": F, "F": I}, {"B": 2048, "AMAX": True}, 8),
    "_cross_entropy": (
        {"logits": B, "labels": "*i64", "losses": F, "scale": "fp32"},
        {"IGNORED": -100, "V": 128256, "B": 4096},
        8,
    ),
    "_adamw": (
        {
            "high": "*i16", "low": "*i16", "m": B, "v": B, "g": B, "scale": F, "lr": "fp32",
            "keep": "fp32", "b1": "fp32", "b2": "fp32", "eps": "fp32", "c1": "fp32", "c2": "fp32", "n": I,
        },
        {"SPLIT": True, "B": 2048},
        8,
    ),
    "_amax": ({"x": B, "out": F, "n": I}, {"P": 1056, "PER": 16, "B": 4096}, 8),
    "_cast": (
        {"x": B, "top": F, "row": "FP8", "col": "FP8", "inverse": F, "M": I, "N": I},
        {"LIMIT": 448.0, "ROW": True, "COL": True, "BM": 128, "BN": 64},
        4,
    ),
}  # fmt: skip


def main() -> None:
    asked = [
        (kernel, arch, dtype, block, warps)
        for arch in ARCHS
        for kernel, dtype, block, warps in (
            ("matmul", "bf16", 64, 4),
            ("matmul", "fp16", 64, 4),
            ("matmul", FP8.get(arch, "bf16"), 64, 4),
            ("matmul", "bf16", 32, 4),
            ("matmul", "bf16", 128, 8),
            ("softmax", "bf16", 64, 4),
        )
    ]
    jobs = [(name, arch) for name in KERNELS for arch in ARCHS if name != "_cast" or arch in FP8]
    tiles = list(dict.fromkeys(asked))
    facts = [result if isinstance(result, dict) else {"error": result} for result in each(tile, tiles)]
    errors = each(kernel_error, jobs)
    report = {
        "version": triton.__version__,
        "tiles": {" ".join(map(str, key[:4])): found for key, found in zip(tiles, facts, strict=True)},
        "kernels": {" ".join(job): error for job, error in zip(jobs, errors, strict=True)},
    }
    sys.stdout.write(json.dumps(report) + "\n")


def each(work: Callable[[Any], Any], jobs: Sequence[Any]) -> list[Any]:
    """The results of the jobs. A compiler that dies takes its process along; that is the result."""
    results, pool = [], ProcessPoolExecutor(1)
    for job in jobs:
        try:
            results.append(pool.submit(work, job).result())
        except BrokenProcessPool:
            results.append("the compiler died")
            pool = ProcessPoolExecutor(1)
    pool.shutdown()
    return results


def tile(asked: tuple[str, str, str, int, int]) -> dict[str, object]:
    kernel, arch, dtype, block, warps = asked
    found: dict[str, object] = machine_code.compiled(kernel, arch, dtype, block=block, warps=warps)
    return found


def kernel_error(job: tuple[str, str]) -> str | None:
    """Compile one kernel of the trainers; the compiler's error, or None."""
    name, arch = job
    arguments, constants, warps = KERNELS[name]
    types_ = {key: f"*{FP8[arch]}" if kind == "FP8" else kind for key, kind in arguments.items()}
    signature = machine_code.signature(types_, constants)
    try:
        source = ASTSource(getattr(kernels(), name), signature, constants)
        triton.compile(source, target=machine_code._target(arch), options={"num_warps": warps})
    except Exception as error:  # noqa: BLE001 - over the releases errors have no common type
        return f"{type(error).__name__}: {error}"
    return None


def kernels() -> types.ModuleType:
    """The trainers' kernels. Their launchers need torch and fused.ops, and compiling does not."""
    for name in ("torch", "fused", "fused.ops"):
        sys.modules.setdefault(name, types.ModuleType(name))
    vars(sys.modules["fused.ops"])["IGNORED"] = -100
    path = ROOT / "trainers/fused/triton_ops.py"
    spec = importlib.util.spec_from_file_location("triton_ops", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
