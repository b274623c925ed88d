"""A torchrun program on processors: the call that the bandwidth checks time, over the stand-in for RCCL.

In: the folder of the stand-ins. Out: a JSON line of rank 0, {"failures": {operation: [what is wrong]}}.
"""

import ctypes
import json
import sys
from pathlib import Path

from workloads import collective_bandwidth as bandwidth
from workloads import collective_library as library
from workloads.ranks import Ranks, joined

SIZES = (64 << 10, 1 << 20)


def main() -> None:
    folder = Path(sys.argv[1])
    hip = ctypes.CDLL(str(folder / "libamdhip64.so.7"), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(folder / "librccl.so.1"))
    with joined() as ranks:
        everyone = ranks.collect(run(hip, ranks))
        if everyone is not None:
            failures = {op: [text for one in everyone for text in one[op]] for op in bandwidth.CHECKED}
            sys.stdout.write(json.dumps({"failures": failures}) + "\n")


def run(hip: ctypes.CDLL, ranks: Ranks) -> dict[str, list[str]]:
    """Operation -> what this rank found wrong."""
    stream = ctypes.c_void_p()
    for code in (hip.hipSetDevice(ranks.rank), hip.hipStreamCreate(ctypes.byref(stream))):
        assert code == 0, f"HIP error {code}"
    assert stream.value
    direct = library.Communicator(ranks, stream.value, library=library.holder())
    bench = bandwidth.bench(ranks, max(SIZES), direct=False)
    bench = bandwidth.Bench(ranks, bench.sent, bench.received, bench.barrier, direct)
    found = {op: [text for size in SIZES for text in _proven(bench, op, size)] for op in bandwidth.CHECKED}
    direct.close()
    return found


def _proven(bench: bandwidth.Bench, op: str, size: int) -> list[str]:
    return bandwidth.proven(bench, op, library.plan(op, size, bench.ranks.size))


if __name__ == "__main__":
    main()
