"""What this machine can do now, measured before a job: matrix products, copies and collectives.

In: the ranks' devices. Out: figures of the slowest rank, and reasons why the machine is unfit. A job on an
unfit machine would measure the machine and not the software, so it does not start. Figures are from short
runs after a rest, as published bounds are: under a power cap a product that runs for a second is a fifth
slower.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

    from peaks import Peak
    from world import World

GEMM = {"cuda": 8192, "cpu": 256}  # m = n = k
COPY_BYTES = {"cuda": 4 << 30, "cpu": 16 << 20}
COLLECTIVE_BYTES = {"cuda": 256 << 20, "cpu": 1 << 20}
REST_S, CALLS, WARM_UP = 0.2, 20, 3
WIPE_BYTES, WIPES = 512 << 20, 60
# Of the datasheet: Primus requires 600 of an MI300X's 1307 TFLOP/s, and an H200 reaches 800 of 989.
LEAST_OF_PEAK = 0.4
LEAST_OF_FASTEST = 0.85  # a rank's GEMM against the fastest rank's; four healthy H200s lay within 3 %


def measure(world: World, peak: Peak, *, fp8: bool) -> dict[str, Any]:
    """All figures and `problems`. A collective call: every rank gets the same answer."""
    kind = world.device.type
    figures = {
        "bf16" if world.gpu else "fp32": _product(world.device),
        **(_fp8_product(world, peak) if fp8 else {}),
    }
    mine = {"gemm_tflops": figures, "copy_gb_per_s": _copy(world.device)}
    ranks: list[Any] = [None] * world.size
    dist.all_gather_object(ranks, mine)
    gemm = {name: [rank["gemm_tflops"][name] for rank in ranks] for name in figures}
    copies = [rank["copy_gb_per_s"] for rank in ranks]
    result = {
        "gemm": [
            {"dtype": name, **dict.fromkeys("mnk", GEMM[kind]), "tflops": min(of), "per_rank": of}
            for name, of in gemm.items()
        ],
        "copy": {"bytes": COPY_BYTES[kind], "gb_per_s": min(copies), "per_rank": copies},
        "collectives": _collectives(world),
    }
    if world.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(world.device)
    return {**result, "problems": problems(result, peak)}


def ceiling(found: dict[str, Any] | None, precision: str) -> float | None:
    """TFLOP/s that the matrix product of this precision reached; None without a preflight."""
    by_type = {entry["dtype"]: entry["tflops"] for entry in found["gemm"]} if found else {}
    return by_type.get("fp8" if precision.startswith("fp8") else "bf16")


def problems(found: dict[str, Any], peak: Peak) -> list[str]:
    """Why this machine is unfit; no reasons if it is fit. Pure."""
    reasons = []
    for entry in found["gemm"]:
        name, rates = entry["dtype"], entry["per_rank"]
        top = {"bf16": peak.bf16, "fp8": peak.fp8}.get(name)
        label = f"{name} product of {entry['m']}³"
        if not all(math.isfinite(rate) and rate > 0 for rate in rates):
            reasons.append(f"{label}: expected finite rates above 0, got {rates} TFLOP/s")
        elif top and min(rates) < LEAST_OF_PEAK * top:
            reasons.append(
                f"{label}: {min(rates):.1f} TFLOP/s is under {LEAST_OF_PEAK:.0%} of {top:g} by the datasheet"
            )
        elif top and min(rates) < LEAST_OF_FASTEST * max(rates):
            slow = rates.index(min(rates))
            reasons.append(
                f"{label}: rank {slow} reaches {min(rates):.1f} TFLOP/s, the fastest rank {max(rates):.1f}"
            )
    others = [found["copy"]["gb_per_s"], *(entry["busbw_gb_per_s"] for entry in found["collectives"])]
    if not all(math.isfinite(rate) and rate > 0 for rate in others):
        reasons.append(f"copy and collectives: expected finite rates above 0, got {others} GB/s")
    return reasons


def _product(device: torch.device) -> float:
    n, dtype = GEMM[device.type], torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _seconds(lambda: torch.mm(a, b.t(), out=out), device) / 1e12


def _fp8_product(world: World, peak: Peak) -> dict[str, float]:
    """The scaled FP8 product, if the device has one."""
    if not (world.gpu and peak.fp8):
        return {}
    n, device = GEMM["cuda"], world.device
    kind = torch.float8_e4m3fnuz if peak.fnuz else torch.float8_e4m3fn
    a, b = (torch.randn(n, n, device=device).to(kind) for _ in range(2))
    one = torch.ones((), device=device)
    call = functools.partial(
        torch._scaled_mm,  # noqa: SLF001 - torch has no public FP8 product
        a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    return {"fp8": 2 * n**3 / _seconds(call, device) / 1e12}


def _copy(device: torch.device) -> float:
    """GB/s, bytes read plus bytes written."""
    size = COPY_BYTES[device.type]
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source), device) / 1e9


def _collectives(world: World) -> list[dict[str, Any]]:
    """Bus bandwidth of the collectives that FSDP and ZeRO-1 use; empty on one rank.

    nccl-tests defines it.
    """
    if world.size == 1:
        return []
    size = COLLECTIVE_BYTES[world.device.type]
    whole = torch.zeros(size // 4 // world.size * world.size, device=world.device)
    part = torch.zeros(whole.numel() // world.size, device=world.device)
    calls = {
        "all_gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    share = (world.size - 1) / world.size
    return [
        {"op": op, "bytes": size, "busbw_gb_per_s": size / _slowest(call, world) * share / 1e9}
        for op, call in calls.items()
    ]


def _slowest(call: Callable[[], object], world: World) -> float:
    """Seconds a call on the slowest rank, from CALLS calls without a pause."""
    for _ in range(WARM_UP):
        call()
    world.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    world.synchronize()
    took = torch.tensor([(time.perf_counter() - begin) / CALLS])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Median seconds a call on this rank."""
    for _ in range(WARM_UP):
        call()
    if device.type != "cuda":
        return statistics.median(_on_host(call) for _ in range(CALLS))
    idle = torch.empty(WIPE_BYTES, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    time.sleep(REST_S)
    for _ in range(WIPES):  # raises the clocks without using up the power budget
        idle.zero_()
    events = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(CALLS)]
    for start, end in events:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in events)) / 1e3


def _on_host(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
