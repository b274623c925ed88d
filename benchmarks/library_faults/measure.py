"""Plant faults inside cuBLAS and NCCL, and see which checks fail. In: a machine with NVIDIA GPUs, gcc.
Out: a table, and its figures as JSON.

    python benchmarks/library_faults/measure.py --out DIR [--only products,speed]

Each setting is one run of the acceptance checks that can see it, with `shim.c` loaded before the libraries. A
check that fails without a fault says nothing, and is left out.
"""

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PRODUCTS = (
    "(test_gemm and not test_gemm_speed) or test_fp8_gemm or test_fp8_recipes or test_tf32_gemm"
    " or test_fp32_is_ieee or test_linear_cross or test_determinism or test_graph_replay or test_no_silent"
    " or test_loss_falls or test_loss_lies or test_ranks_agree or test_bf16_job or test_resume_is"
    " or (test_attention_backend and math) or (test_fp8_job_follows_the_reference and own) or test_witness"
)
SPEED = "test_gemm_speed or test_throughput_fsdp2 or test_fp8_is_worth_it"
COLLECTIVES = "test_collectives.py or test_loss_falls or test_ranks_agree or test_resume or test_peer_copies"
LINKS = "test_collective_speed.py or test_all_reduce_values or test_node_speed.py"
FLIP = {"FAULT_KIND": "flip", "FAULT_ELEMENTS": "1"}
RARELY = {"FAULT_EVERY": "20"}
# A group's checks; then the faults, of which the first is none.
GROUPS: Mapping[str, tuple[str, Mapping[str, Mapping[str, str]]]] = {
    "products": (
        PRODUCTS,
        {
            "none": {},
            **{f"mantissa bit {n} of one element": {**FLIP, "FAULT_BIT": f"{n}"} for n in (1, 4, 7)},
            "mantissa bit 1 of one element, one call in 20": {**FLIP, "FAULT_BIT": "1", **RARELY},
            **{f"{n} mantissa bits are kept": {"FAULT_KIND": "short", "FAULT_BIT": f"{n}"} for n in (9, 5)},
            "the last element is 0": {"FAULT_KIND": "last"},
            "nobody waits for them": {"FAULT_KIND": "race"},
            "one call in 20 fails": {"FAULT_KIND": "fail", **RARELY},
        },
    ),
    "speed": (
        SPEED,
        {
            "none": {},
            **{f"one in {n} runs twice": {"FAULT_KIND": "slow", "FAULT_EVERY": f"{n}"} for n in (20, 10, 5)},
        },
    ),
    "collectives": (
        COLLECTIVES,
        {
            "none": {},
            **{f"mantissa bit {n} of one element": {**FLIP, "FAULT_BIT": f"{n}"} for n in (1, 7)},
            "mantissa bit 1 of one element, one call in 20": {**FLIP, "FAULT_BIT": "1", **RARELY},
            "the last element is 0": {"FAULT_KIND": "last"},
            "one call in 20 fails": {"FAULT_KIND": "fail", **RARELY},
        },
    ),
    "links": (
        LINKS,
        {
            "none": {},
            "no peer access": {"NCCL_P2P_DISABLE": "1"},
            "neither peer access nor shared memory": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"},
            "one channel": {"NCCL_MAX_NCHANNELS": "1"},
        },
    ),
}
SHOWN = 0.01  # figures that changed by less are not printed
LIBRARY = {"products": "products", "speed": "products", "collectives": "collectives"}


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--out", type=Path, required=True)
    asked.add_argument("--only", default="products,speed", help="groups of faults")
    asked.add_argument("--limit-s", type=float, default=500.0, help="begin no fault after this time")
    asked.add_argument("--fault", action="append", help="plant these only, by their names")
    options = asked.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    shim, kernel = built(options.out)
    found: dict[str, dict[str, Any]] = {}
    begun = time.monotonic()
    for group in options.only.split(","):
        selection, faults = GROUPS[group]
        for fault, variables in faults.items():
            if options.fault and fault not in ("none", *options.fault):
                continue
            if time.monotonic() - begun > options.limit_s:
                print(f"not run, no time was left: {group}: {fault}")
                continue
            loaded = {
                "LD_PRELOAD": str(shim),
                "FAULT_KERNEL": str(kernel),
                "FAULT_IN": LIBRARY.get(group, ""),
            }
            one = run(f"{group}: {fault}", selection, {**variables, **loaded}, options.out)
            found[f"{group}: {fault}"] = one
            text = json.dumps(found, indent=1) + "\n"
            (options.out / "library-faults.json").write_text(text, encoding="utf-8")
            calls = f"{one['calls']} calls, {one['changed']} changed"
            print(f"{one['seconds']:5.0f} s  {group}: {fault}: {calls}; {one['counts']}", flush=True)
    show(found)


def built(out: Path) -> tuple[Path, Path]:
    """The shim and the kernel, compiled for this machine's torch."""
    shim, kernel = (out / "shim.so").resolve(), (out / "edit.ptx").resolve()
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-pthread", str(HERE / "shim.c"), "-o", str(shim), "-ldl"],
        check=True,
    )
    kernel.write_bytes(compiled((HERE / "edit.cu").read_bytes()))
    return shim, kernel


def compiled(source: bytes) -> bytes:
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


def run(name: str, selection: str, variables: Mapping[str, str], out: Path) -> dict[str, Any]:
    """One run of the checks: outcome and gated figures by check."""
    label = re.sub(r"\W+", "-", name)
    log, results = out / f"{label}.calls", out / f"{label}.results"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "tests/",
        "--gpu-vendor",
        "nvidia",
        "--tier",
        "standard",
        "-k",
        selection,
    ]
    command += ["--result-dir", str(results), "-p", "no:cacheprovider", "-q"]
    command += [] if name.startswith("speed") else ["-n", "8"]
    begun = time.monotonic()
    with (out / f"{label}.txt").open("w") as output:
        environment = {**os.environ, **variables, "FAULT_LOG": str(log)}
        subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=400,
            check=False,
        )
    checks = json.loads((results / "result.json").read_text(encoding="utf-8"))["checks"]
    pairs = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    outcomes = {check["id"]: check["outcome"] for check in checks}
    return {
        "seconds": time.monotonic() - begun,
        "calls": sum(int(calls) for calls, _ in pairs),
        "changed": sum(int(changed) for _, changed in pairs),
        "counts": {
            outcome: list(outcomes.values()).count(outcome) for outcome in sorted(set(outcomes.values()))
        },
        "outcomes": outcomes,
        "figures": {
            f"{check['id']} {metric['name']} {json.dumps(metric['conditions'], sort_keys=True)}": metric[
                "value"
            ]
            for check in checks
            for metric in check["metrics"]
            if "/s" in metric["unit"]
        },
    }


def show(found: Mapping[str, Mapping[str, Any]]) -> None:
    """For each fault: the checks that failed beside those that fail without it, and figures that changed."""
    plain = {name.partition(":")[0]: one for name, one in found.items() if name.endswith(": none")}
    for name, one in found.items():
        healthy = plain[name.partition(":")[0]]
        if one is healthy:
            continue
        seen: dict[str, int] = defaultdict(int)
        able: dict[str, int] = defaultdict(int)
        for check, outcome in one["outcomes"].items():
            if healthy["outcomes"].get(check) == "passed":
                short = check.partition("::")[2].partition("[")[0]
                able[short] += 1
                seen[short] += outcome in ("failed", "error")
        by = [f"{check} {count}/{able[check]}" for check, count in sorted(seen.items()) if count]
        print(f"== {name}: seen by {', '.join(by) or 'none'}")
        print(
            "   not by " + ", ".join(f"{check} ({able[check]})" for check in sorted(seen) if not seen[check])
        )
        for figure, value in one["figures"].items():
            before = healthy["figures"].get(figure)
            if before and abs(value / before - 1) > SHOWN:
                print(f"   {figure}: {value / before - 1:+.1%}")


if __name__ == "__main__":
    main()
