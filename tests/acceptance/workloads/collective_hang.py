"""A torchrun program: the last rank stays away from a collective, the others wait in it. One JSON line.

Arguments: how long a collective may take, and how much longer until the library must have given up. The line
is `{"absent": [ranks that never came], "errors": {rank: what the library told it, or null}}`. Who came is
known from marks in the rendezvous store, set right before the call: a library that hangs can name nobody.
"""

import argparse
import datetime as dt
import json
import os
import threading
import time

import torch
import torch.distributed as dist

from workloads.ranks import Ranks, joined

POLL_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("timeout_s", type=float)
    parser.add_argument("patience_s", type=float)
    options = parser.parse_args()
    with joined() as ranks:
        # A group of its own: to join the world within seconds would be too much to ask of a busy host.
        group = dist.new_group(timeout=dt.timedelta(seconds=options.timeout_s))
        dist.all_reduce(torch.ones(8, device=ranks.device), group=group)
        if ranks.rank < ranks.size - 1:
            limit_s = options.timeout_s + options.patience_s
            # The call may never return: then this thread ends the rank, with nothing to report of it.
            threading.Thread(target=_end_after, args=(ranks, limit_s), daemon=True).start()
            ranks.store.set(f"came/{ranks.rank}", "1")
            _end(ranks, _told(ranks, group))
        _until_over(ranks)
        os._exit(0)


def _told(ranks: Ranks, group: dist.ProcessGroup) -> str | None:
    """What the library says to a rank that waits in vain."""
    tensor = torch.ones(1 << 10, device=ranks.device)
    try:
        # Asked for as asynchronous: only such a call gives back what can be waited for, and NCCL's timeout
        # raises in that wait alone.
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        tensor.sum().item()
    except RuntimeError as error:
        return str(error)[-400:] or type(error).__name__
    return None


def _end_after(ranks: Ranks, seconds: float) -> None:
    time.sleep(seconds)
    _end(ranks, None)


def _end(ranks: Ranks, error: str | None) -> None:
    """Report and leave at once: tearing down a communicator in that state may hang as well."""
    ranks.store.set(f"told/{ranks.rank}", json.dumps(error))
    if ranks.rank == 0:
        waiting = range(ranks.size - 1)
        errors = {rank: json.loads(ranks.store.get(f"told/{rank}")) for rank in waiting}
        absent = [rank for rank in range(ranks.size) if not ranks.store.check([f"came/{rank}"])]
        print(json.dumps({"absent": absent, "errors": errors}), flush=True)
        ranks.store.set("over", "1")
    else:
        _until_over(ranks)
    os._exit(0)


def _until_over(ranks: Ranks) -> None:
    """Asked for again and again: to wait in the store would end with the store's own timeout."""
    while not ranks.store.check(["over"]):
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
