"""Every collective over the ranks of several nodes. In: torchrun's environment. Out: one JSON line of rank 0.

`{"ranks", "wrong": [...], "busbw_gb_per_s": {bytes: GB/s}}`. Every element of each result is compared: a link
that changes bits is worse than a slow one. The small cases are those of one machine's smoke tier. busbw is
that of an all-reduce by nccl-tests' definition, 2 (n - 1) / n of what one rank holds, by time.
"""

import json
import sys
import time

import torch
import torch.distributed as dist

from workloads import collective_values, synchronize
from workloads.ranks import Book, Ranks, joined

CPU_BYTES = (1 << 12, 1 << 20, 1 << 24)
GPU_BYTES = (1 << 12, 1 << 20, 1 << 26, 1 << 30)
REPEATS = 5


def main() -> None:
    """Every collective is right; then every size of the all-reduce is right, and how fast."""
    with joined(timeout_s=float(sys.argv[1])) as ranks:
        wrong = _collectives_are_right(ranks)
        speeds: dict[str, float] = {}
        for size in GPU_BYTES if ranks.device.type == "cuda" else CPU_BYTES:
            wrong += _sum_is_right(ranks, size)
            speeds[str(size)] = _busbw_gb_per_s(ranks, size)
        everyone = ranks.collect({"wrong": wrong}, about="link")
        if everyone is not None:
            found = [f"rank {rank}: {text}" for rank, each in enumerate(everyone) for text in each["wrong"]]
            print(json.dumps({"ranks": ranks.size, "wrong": found, "busbw_gb_per_s": speeds}), flush=True)


def _collectives_are_right(ranks: Ranks) -> list[str]:
    """The failures of the collectives on any rank; empty on every rank but 0."""
    book = Book(ranks)
    for operation, name, function in collective_values.cases(ranks, "smoke"):
        book.judge(operation, name, function)
    merged = book.merged() or {"cases": []}
    return [f"{case['name']}: {text}" for case in merged["cases"] for text in case["failures"]]


def _sum_is_right(ranks: Ranks, size: int) -> list[str]:
    """Small whole numbers, which every order of a float32 sum adds exactly."""
    pattern = torch.arange(size // 4, device=ranks.device, dtype=torch.float32) % 251
    given = pattern + ranks.rank
    dist.all_reduce(given)
    expected = pattern * ranks.size + ranks.size * (ranks.size - 1) / 2
    bad = int((given != expected).sum())
    return [f"{bad} of {size // 4} elements of an all-reduce of {size} bytes are wrong"] if bad else []


def _busbw_gb_per_s(ranks: Ranks, size: int) -> float:
    data = torch.zeros(size // 4, device=ranks.device)
    times = []
    for _ in range(REPEATS + 1):  # the first one sets up connections
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        synchronize()
        times.append(time.perf_counter() - start)
    # Ranks on processors share them with whatever else runs there: their fastest repeat shows the link.
    seconds = sorted(times[1:])[REPEATS // 2 if ranks.device.type == "cuda" else 0]
    return 2 * (ranks.size - 1) / ranks.size * size / seconds / 1e9


if __name__ == "__main__":
    main()
