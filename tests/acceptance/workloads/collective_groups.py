"""Set up and tear down the world many times, with and without a device id. In: ranks whose world is closed.
Out: times, and what grew.

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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from workloads import backend
from workloads.ranks import Ranks

CYCLES, WARM, LEAST = 200, 4, 8
BUDGET_S = {"standard": 4.0, "soak": 600.0}  # for each way; a cycle on GPUs takes tenths of a second
LIMIT_S, LEAVE_S = 30.0, 2.0  # for one cycle, and for the other ranks to leave after one that hung
STATUS, DESCRIPTORS = Path("/proc/self/status"), Path("/proc/self/fd")


def run(ranks: Ranks, tier: str, report: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """One entry for each way, on rank 0; `report` is what rank 0 has to print if a cycle hangs."""
    ways = ("without a device id", *(("with a device id",) if ranks.device.type == "cuda" else ()))
    found: list[dict[str, Any]] = []
    for way in ways:
        with _watched(ranks, {**report, "groups": [*found, {"way": way, "stuck": True}]}) as alive:
            entry = _cycles(ranks, way, BUDGET_S[tier], alive)
        everyone = ranks.collect(entry, about=f"groups {way}")
        found += [_merged(everyone)] if everyone is not None else []
    return None if ranks.rank else found


@contextlib.contextmanager
def _watched(ranks: Ranks, report: dict[str, Any]) -> Iterator[dict[str, float]]:
    """End this process if a cycle takes longer than its limit; rank 0 prints the report first. The block sets
    `end`, the moment when the present cycle is overdue.
    """
    alive, over = {"end": time.monotonic() + LIMIT_S}, threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            if time.monotonic() > alive["end"]:
                if ranks.rank == 0:
                    print(json.dumps(report), flush=True)
                    time.sleep(LEAVE_S)  # the store may be in this process, and the others still need it
                os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    yield alive
    over.set()


def _cycles(ranks: Ranks, way: str, budget_s: float, alive: dict[str, float]) -> dict[str, Any]:
    begun, seconds, wrong = time.monotonic(), list[float](), list[int]()
    before: dict[str, float] = {}
    for number in itertools.count():
        alive["end"] = time.monotonic() + LIMIT_S
        if number == WARM:
            before = holdings(ranks)
        late = number >= LEAST + WARM and time.monotonic() - begun > budget_s
        if not _goes_on(ranks, f"{way}/{number}", over=number >= CYCLES or late):
            break
        start = time.monotonic()
        if not cycle(ranks, f"{way}/{number}", bound="with a" in way):
            wrong.append(number)
        seconds.append(time.monotonic() - start)
    after = holdings(ranks)
    return {
        "way": way,
        "stuck": False,
        "cycles": len(seconds),
        "counted": len(seconds) - WARM,
        "wrong": wrong,
        "median_s": statistics.median(seconds),
        "slowest_s": max(seconds),
        "grown": {name: after[name] - before[name] for name in after},
    }


def _goes_on(ranks: Ranks, key: str, *, over: bool) -> bool:
    """Rank 0 decides for all."""
    if ranks.rank == 0:
        ranks.store.set(f"goes on/{key}", "" if over else "1")
    return bool(ranks.store.get(f"goes on/{key}"))


def cycle(ranks: Ranks, key: str, *, bound: bool) -> bool:
    """One world: whether its sum was right."""
    dist.init_process_group(
        backend(),
        store=dist.PrefixStore(f"world/{key}", ranks.store),
        rank=ranks.rank,
        world_size=ranks.size,
        timeout=dt.timedelta(seconds=LIMIT_S),
        **({"device_id": ranks.device} if bound else {}),
    )
    mine = torch.full((1024,), float(ranks.rank + 1), device=ranks.device)
    dist.all_reduce(mine)
    right = bool((mine == ranks.size * (ranks.size + 1) / 2).all())
    # Nobody leaves while another rank may still read this one's memory.
    ranks.store.set(f"summed/{key}/{ranks.rank}", "1")
    for rank in range(ranks.size):
        ranks.store.get(f"summed/{key}/{rank}")
    dist.destroy_process_group()
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
        found["device_mib"] = (total - free) / 2**20
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
