"""The ranks of a program, as forks of this process. In: their number, a program, arguments.
Out: an exit code.

Each rank has the variables that torchrun gives it, and meets the others in a store of this process, as
under torchrun's agent. That agent itself cannot be used: it asks how many devices there are before it
forks, and a device that was asked before a fork is broken after it. `harness.launch` starts the real
torchrun for jobs in new processes.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time

from torch.distributed import TCPStore

from harness import forked, processes, rank

ADDRESS = "127.0.0.1"
PR_SET_PDEATHSIG = 1  # prctl(2)
END_S = 5.0
PORT_BYTES = 5


def main(count: int, program: str, arguments: list[str]) -> int:
    """Run the ranks to their end; when one fails, end the others. Returns the exit code."""
    # The store starts threads. A rank that was forked beside them may find one of their locks held for ever,
    # so all ranks are forked before it, and get its port through a pipe.
    reading, writing = os.pipe()
    ranks: dict[int, int] = {}
    for number in range(count):
        if pid := os.fork():
            ranks[pid] = number
            continue
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(writing)
        os.environ.update(_variables(number, count, int(os.read(reading, PORT_BYTES))))
        os.close(reading)
        forked.tell_allocator()
        sys.argv = [str(rank.__file__), program, *arguments]
        forked.run(rank.main)
    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    os.write(writing, f"{store.port:{PORT_BYTES}}".encode() * count)
    while ranks:
        pid, status = os.wait()
        ended, code = ranks.pop(pid, None), os.waitstatus_to_exitcode(status)
        if ended is not None and code:
            # The prefix is that of a rank's last words; a signal leaves none of its own.
            prefix = f"[rank{ended}]: " if code < 0 else ""
            print(f"{prefix}rank {ended} {processes.end_of(code)}", file=sys.stderr)
            _end(ranks)
            return 1
    return 0


def _variables(number: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank (torch/distributed/elastic/agent/server/local_elastic_agent.py)."""
    ranked = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(number))
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE"), str(count))
    return {
        **ranked,
        **sizes,
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "MASTER_ADDR": ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }


def _end(ranks: dict[int, int]) -> None:
    """Ask the ranks to end, as torchrun does, and kill those that do not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + END_S
        while ranks and time.monotonic() < deadline:
            pid, _ = os.waitpid(-1, os.WNOHANG)
            ranks.pop(pid, None)
            time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
