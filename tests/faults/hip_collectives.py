"""A program of ranks on a CPU: the suite's own binding of RCCL, over the stand-in. In: the folder of the
libraries.

Out: a JSON line of rank 0, {"holder", "version", "runtime", "elapsed_ms", "wrong": {operation: elements},
"bad_stream": what a stream that HIP did not make is answered with}.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "acceptance"))

from vendors import amd_software, software
from workloads import collective_library as library
from workloads.ranks import Ranks, joined

SIZES = (4096, 1 << 20)


def main() -> None:
    folder = Path(sys.argv[1])
    hip = ctypes.CDLL(str(folder / "libamdhip64.so.7"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "librccl.so.1"))
    with joined() as ranks:
        report = run(hip, ranks)
        everyone = ranks.collect(report)
        if everyone is not None:
            wrong = {op: sum(one["wrong"][op] for one in everyone) for op in report["wrong"]}
            sys.stdout.write(json.dumps({**report, "wrong": wrong}) + "\n")


def run(hip: ctypes.CDLL, ranks: Ranks) -> dict[str, Any]:
    stream, start, stop = (ctypes.c_void_p() for _ in range(3))
    done(hip.hipSetDevice(ranks.rank))
    done(hip.hipStreamCreate(ctypes.byref(stream)))
    for event in (start, stop):
        done(hip.hipEventCreate(ctypes.byref(event)))
    assert stream.value
    world = library.Communicator(ranks, stream.value, library=library.holder())
    done(hip.hipEventRecord(start, stream))
    wrong = {op: sum(elements_wrong(world, ranks, op, size) for size in SIZES) for op in OPERATIONS}
    done(hip.hipEventRecord(stop, stream))
    done(hip.hipStreamSynchronize(stream))
    elapsed = ctypes.c_float()
    done(hip.hipEventElapsedTime(ctypes.byref(elapsed), start, stop))
    holder = library.holder()
    bad = library.Communicator.__new__(library.Communicator)
    vars(bad).update(vars(world) | {"stream": ctypes.addressof(elapsed)})
    answer = refused(bad, ranks)
    world.close()
    done(hip.hipStreamDestroy(stream))
    return {
        "holder": Path(holder).name,
        "version": software.nccl(ctypes.CDLL(holder)),
        "runtime": amd_software._hip(hip),
        "elapsed_ms": elapsed.value,
        "wrong": wrong,
        "bad_stream": answer,
    }


def done(code: int) -> None:
    assert code == 0, code


OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")


def elements_wrong(world: library.Communicator, ranks: Ranks, op: str, size: int) -> int:
    """Elements that differ from plain arithmetic. Small integers, so that every sum is exact in bfloat16."""
    plan = library.plan(op, size, ranks.size)
    everyone = [values(rank, plan.sent) for rank in range(ranks.size)]
    out = torch.full((plan.received,), float("nan"), dtype=torch.bfloat16)
    world.caller(op, plan, everyone[ranks.rank], out)(0)
    return int((out != expected(op, plan, everyone, ranks)).sum())


def values(rank: int, count: int) -> torch.Tensor:
    return ((torch.arange(count) * 7 + 13 * rank) % 17 - 8).bfloat16()


def expected(op: str, plan: library.Plan, everyone: list[torch.Tensor], ranks: Ranks) -> torch.Tensor:
    share = slice(ranks.rank * plan.count, (ranks.rank + 1) * plan.count)
    if op == "all_gather":
        return torch.cat(everyone)
    if op == "all_to_all":
        return torch.cat([one[share] for one in everyone])
    total = torch.stack([one.float() for one in everyone]).sum(0).bfloat16()
    return total if op == "all_reduce" else total[share]


def refused(world: library.Communicator, ranks: Ranks) -> str:
    plan = library.plan("all_reduce", 4096, ranks.size)
    buffer = torch.zeros(plan.sent, dtype=torch.bfloat16)
    try:
        world.caller("all_reduce", plan, buffer, buffer.clone())(0)
    except RuntimeError as error:
        return str(error)
    return "accepted"


if __name__ == "__main__":
    main()
