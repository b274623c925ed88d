"""Set up and tear down the world many times, with and without a device id, and groups of one world.
In: ranks whose world is closed. Out: times, and what grew.

Restarted trainers, servers and notebooks do so in one process. A group that leaves memory, threads or file
descriptors behind ends such a process after hours, and one that hangs ends the run. A cycle is: set up, one
all-reduce on known values, tear down.
"""

import contextlib
import datetime as dt
import gc
import itertools
import json
import os
import statistics
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workloads import backend
from workloads.ranks import Ranks
from workloads.time_limits import scaled

CYCLES, WARM, LEAST = 200, 4, 8
INSIDE = "groups of one world"
BUDGET_S = {"standard": 4.0, "soak": 600.0}  # for each way; a cycle on GPUs takes tenths of a second
LIMIT_S, LEAVE_S = 30.0, 2.0  # for one cycle, and between the end of one that hung and that of its process
SHARED = "device_mib"
STATUS, DESCRIPTORS = Path("/proc/self/status"), Path("/proc/self/fd")


def run(ranks: Ranks, tier: str) -> dict[str, Any] | None:
    """`{"groups": [...]}` with one entry for each way, on rank 0, which prints it itself if a cycle hangs."""
    ways = ("without a device id", *(("with a device id",) if ranks.device.type == "cuda" else ()))
    ways += (INSIDE,) if tier == "soak" or ranks.device.type == "cpu" else ()  # it has not run on a GPU
    found: list[dict[str, Any]] = []
    for way in ways:
        watch = Watch(time.monotonic() + scaled(LIMIT_S), {"way": way, "stuck": True, "error": None})
        around = _world(ranks, way, bound=True) if way == INSIDE else contextlib.nullcontext()
        with watched(ranks, watch, {"groups": [*found, watch.entry]}), around:
            entry = _cycles(ranks, watch, BUDGET_S[tier])
        everyone = ranks.collect(entry, about=f"groups {way}")
        found += [_merged(everyone)] if everyone is not None else []
    return None if ranks.rank else {"groups": found}


@dataclass
class Watch:
    """When the present cycle is overdue, and what rank 0 then has to report."""

    end: float
    entry: dict[str, Any]


@contextlib.contextmanager
def watched(ranks: Ranks, watch: Watch, report: Mapping[str, Any]) -> Iterator[None]:
    """End this process if a cycle is overdue; rank 0 prints the report first."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.2):
            if time.monotonic() > watch.end:
                if ranks.rank == 0:
                    print(json.dumps(report), flush=True)
                time.sleep(LEAVE_S)  # until rank 0 has reported, and because its process may hold the store
                os._exit(0)

    threading.Thread(target=run, daemon=True).start()
    yield
    over.set()


def _cycles(ranks: Ranks, watch: Watch, budget_s: float) -> dict[str, Any]:
    way, begun, seconds, wrong = watch.entry["way"], time.monotonic(), list[float](), list[int]()
    held: list[dict[str, float]] = []
    for number in itertools.count():
        watch.end = time.monotonic() + scaled(LIMIT_S)
        if number >= WARM:
            held.append(holdings(ranks))
        late = number >= LEAST + WARM and time.monotonic() - begun > budget_s
        if not goes_on(ranks, f"{way}/{number}", over=number >= CYCLES or late):
            break
        start = time.monotonic()
        try:
            key = f"{way}/{number}"
            right = regroup(ranks, key) if way == INSIDE else cycle(ranks, key, bound="with a" in way)
        except RuntimeError as error:  # the other ranks may wait in vain: all end by their watch
            watch.entry["error"] = f"world {number}: {str(error)[:300]}"
            time.sleep(10 * scaled(LIMIT_S))
            raise
        seconds.append(time.monotonic() - start)
        wrong += [] if right else [number]
    return {
        **watch.entry,
        "stuck": False,
        "cycles": len(seconds),
        "counted": len(seconds) - WARM,
        "wrong": wrong,
        "median_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "grown": growth(held),
    }


def growth(held: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """What grew from the first holdings to the last. Of the device's memory, what grew in each third.

    That memory is everybody's: a neighbour that begins takes some once, and a leak takes some all the time.
    """
    last = len(held) - 1
    grown = {name: held[last][name] - held[0][name] for name in held[0]}
    if SHARED in grown:
        edges = itertools.pairwise(round(third * last / 3) for third in range(4))
        grown[SHARED] = 3 * min(held[end][SHARED] - held[begin][SHARED] for begin, end in edges)
    return grown


def goes_on(ranks: Ranks, key: str, *, over: bool) -> bool:
    """Rank 0 decides for all."""
    if ranks.rank == 0:
        ranks.store.set(f"goes on/{key}", "" if over else "1")
    return bool(ranks.store.get(f"goes on/{key}"))


def cycle(ranks: Ranks, key: str, *, bound: bool) -> bool:
    """One world: whether its sum was right."""
    with _world(ranks, key, bound=bound):
        return _sums(ranks, key)


def regroup(ranks: Ranks, key: str) -> bool:
    """One group of the world: whether its sum was right."""
    group = dist.new_group()
    right = _sums(ranks, key, group)
    dist.destroy_process_group(group)
    return right


@contextlib.contextmanager
def _world(ranks: Ranks, key: str, *, bound: bool) -> Iterator[None]:
    dist.init_process_group(
        backend(),
        store=dist.PrefixStore(f"world/{key}", ranks.store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=dt.timedelta(seconds=4 * scaled(LIMIT_S)),  # the watch comes first
        **({"device_id": ranks.device} if bound and ranks.device.type == "cuda" else {}),
    )
    yield
    dist.destroy_process_group()


def _sums(ranks: Ranks, key: str, group: dist.ProcessGroup | None = None) -> bool:
    mine = torch.full((1024,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(mine, group=group)
    right = bool((mine == ranks.size * (ranks.size + 1) / 2).all())
    # Nobody leaves while another rank may still read this one's memory.
    ranks.store.set(f"summed/{key}/{ranks.rank}", "1")
    for rank in range(ranks.size):
        ranks.store.get(f"summed/{key}/{rank}")
    return right


def holdings(ranks: Ranks) -> dict[str, float]:
    """What this process holds: descriptors, threads, MiB of host memory, and MiB of the device by anybody."""
    gc.collect()
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    found = {
        "descriptors": float(sum(1 for _ in DESCRIPTORS.iterdir())),
        "threads": float(lines["Threads"]),
        "host_mib": int(lines["VmRSS"].split()[0]) / 1024,
    }
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(ranks.device)
        found[SHARED] = (total - free) / 2**20
    return found


def _merged(everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """The worst of all ranks."""
    worst = {name: max(one["grown"][name] for one in everyone) for name in everyone[0]["grown"]}
    return {
        **everyone[0],
        "wrong": sorted({number for one in everyone for number in one["wrong"]}),
        "slowest_s": max(one["slowest_s"] for one in everyone),
        "grown": worst,
    }
