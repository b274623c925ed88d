"""A torchrun program: the last rank never joins a collective, and the others wait. In: two times.
Out: a JSON line.

The times are the collective's timeout, and how much later the library must have given up. The line is
`{"absent": [ranks that never joined], "errors": {rank: the library's error, or null}}`. Each rank marks in
the rendezvous store that it joins, right before the call, because a library that hangs cannot name the absent
rank.
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
    parser.add_argument("beyond_s", type=float)
    options = parser.parse_args()
    with joined() as ranks:
        # A separate group: on a busy host the world itself may need longer than this timeout to form.
        group = dist.new_group(timeout=dt.timedelta(seconds=options.timeout_s))
        dist.all_reduce(torch.ones(8, device=ranks.device), group=group)
        if ranks.rank < ranks.size - 1:
            limit_s = options.timeout_s + options.beyond_s
            # If the call never returns, this thread ends the rank and reports no error.
            watch = threading.Timer(limit_s, _end, (ranks, None))
            watch.daemon = True
            watch.start()
            ranks.store.set(f"came/{ranks.rank}", "1")
            _end(ranks, _library_error(ranks, group))
        _until_over(ranks)
        os._exit(0)


def _library_error(ranks: Ranks, group: dist.ProcessGroup) -> str | None:
    """The library's error on a rank that waits in vain; None if there was none."""
    tensor = torch.ones(1 << 10, device=ranks.device)
    try:
        # Asynchronous, because NCCL's timeout raises only in the wait for such a call.
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        tensor.sum().item()
    except RuntimeError as error:
        return str(error)[-400:] or type(error).__name__
    return None


def _end(ranks: Ranks, error: str | None) -> None:
    """Report, and exit at once: destroying the communicator may hang as well."""
    ranks.store.set(f"error/{ranks.rank}", json.dumps(error))
    if ranks.rank == 0:
        waiting = range(ranks.size - 1)
        errors = {rank: json.loads(ranks.store.get(f"error/{rank}")) for rank in waiting}
        absent = [rank for rank in range(ranks.size) if not ranks.store.check([f"came/{rank}"])]
        print(json.dumps({"absent": absent, "errors": errors}), flush=True)
        ranks.store.set("over", "1")
    else:
        _until_over(ranks)
    os._exit(0)


def _until_over(ranks: Ranks) -> None:
    """Poll: a wait in the store would end with the store's own timeout."""
    while not ranks.store.check(["over"]):
        time.sleep(POLL_S)


if __name__ == "__main__":
    main()
