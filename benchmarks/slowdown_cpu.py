"""Plant slow-downs in all-reduce and training on the processor, and judge them as `compare --paired` does.

Usage, with a Python that has torch: python benchmarks/slowdown_cpu.py OUT.json [ROUNDS]. First A runs
against itself, then A and B take turns, ROUNDS runs of each; B is planted with each loss of LOSSES. A run is
two fresh processes over gloo: an all-reduce of 4 MiB, and steps of a tiny FSDP job. A planted process spins
after each call, for that share of the call's own processor time. Two figures of each: the time on the clock,
as the suites measure it, and processor time, which other jobs of the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # before torch is loaded: --help needs none
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="where the runs go")
    parser.add_argument("rounds", nargs="?", type=int, default=10, help="runs of each arm")
    GIVEN = parser.parse_args()

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from stackcheck.history import regressions

if TYPE_CHECKING:
    from collections.abc import Callable

LOSSES = (0.02, 0.05, 0.20)
RANKS, REPEATS, CALLS = 2, 7, 2
Figures = dict[str, float]


def rank_of_run(rank: int, meeting: str, share: float, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS)
    figures = {
        f"{name} {kind}": value
        for name, call in (("all-reduce", all_reduce()), ("training step", training()))
        for kind, value in measured(call, share).items()
    }
    dist.barrier()
    if rank == 0:
        Path(out).write_text(json.dumps(figures))
    dist.destroy_process_group()


def all_reduce() -> Callable[[], Any]:
    data = torch.ones(2**20)
    return lambda: dist.all_reduce(data, op=dist.ReduceOp.MAX)


def training() -> Callable[[], Any]:
    torch.manual_seed(0)
    layers = [torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True) for _ in range(2)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (*layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    data = torch.randn(4, 64, 128)

    def step() -> None:
        model(data).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def measured(call: Callable[[], Any], share: float) -> Figures:
    """Milliseconds of a call: the median of REPEATS, of CALLS calls each."""
    for _ in range(3):
        call()
    own = statistics.median(timed(call)[1] for _ in range(5))

    def planted() -> None:
        call()
        spin(share * own)

    found = [timed(planted if share else call) for _ in range(REPEATS)]
    wall, used = (statistics.median(values) * 1e3 for values in zip(*found, strict=True))
    return {"clock": wall, "processor": used}


def timed(call: Callable[[], Any]) -> tuple[float, float]:
    """Seconds of one call on the clock, and of this process's processor."""
    start, used = time.perf_counter(), time.process_time()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS, (time.process_time() - used) / CALLS


def spin(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def run(share: float) -> Figures:
    """One run in fresh processes. Forked, as they would all load torch again otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/figures.json"
        ranks = []
        for rank in range(RANKS):
            child = os.fork()
            if not child:
                try:
                    rank_of_run(rank, f"{folder}/meeting", share, out)
                    os._exit(0)
                finally:
                    os._exit(1)
            ranks.append(child)
        ended = [os.waitpid(child, 0)[1] for child in ranks]
        if any(ended):
            sys.exit(f"a rank failed: {ended}")
        found: Figures = json.loads(Path(out).read_text())
        return found


def turns(first: float, second: float, rounds: int) -> tuple[list[Figures], list[Figures]]:
    """Runs of two arms in turn; neither is always the first."""
    arms: tuple[list[Figures], list[Figures]] = [], []
    for turn in range(rounds):
        for arm in (0, 1) if turn % 2 == 0 else (1, 0):
            arms[arm].append(run((first, second)[arm]))
    return arms


def main(out: str, rounds: int = 5) -> None:
    began, load = time.time(), os.getloadavg()[0]
    itself = turns(0, 0, rounds)
    pairs = {share: turns(0, share, rounds) for share in LOSSES}
    rows = []
    for name in itself[0][0]:
        again = [[each[name] for each in arm] for arm in itself]
        for share, arms in pairs.items():
            a, b = ([each[name] for each in arm] for arm in arms)
            pair = regressions.paired(a, b, "max", again=again)
            rows.append({"figure": name, "planted": share, "again": again, "a": a, "b": b, **vars_of(pair)})
            print(
                f"{name:24} planted {share:4.0%}  measured {pair.loss:6.1%}  noise {pair.noise:6.2%}"
                f"  counts from {pair.limit:6.1%}  finds {pair.resolves:6.1%}  {pair.verdict}"
            )
    facts = {"load": [load, os.getloadavg()[0]], "cores": os.cpu_count(), "seconds": time.time() - began}
    Path(out).write_text(json.dumps(facts | {"torch": torch.__version__, "rounds": rounds, "pairs": rows}))
    print(facts)


def vars_of(pair: regressions.Pair) -> dict[str, Any]:
    return {name: getattr(pair, name) for name in ("loss", "noise", "limit", "resolves", "verdict")}


if __name__ == "__main__":
    main(GIVEN.out, GIVEN.rounds)
