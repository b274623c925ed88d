"""The child's half of a hang report: on a signal, write every Python stack, even from inside C++ code.

In: the folder in STACKCHECK_STACKS. Out: NAME.pid and NAME.stack.txt there; once the folder holds a file
`dump`, also the collective library's flight recorder as NAME.flight.pickle.
"""

import faulthandler
import os
import sys
import threading
import time
from pathlib import Path

from harness.processes import STACK_SIGNAL, STACKS

POLL_S = 0.5


def offer(name: str) -> None:
    """Let the parent ask this process for its stacks, under a name."""
    folder = Path(os.environ[STACKS])
    # The file stays open: faulthandler writes to its descriptor from the signal handler.
    stack_file = (folder / f"{name}.stack.txt").open("w")
    faulthandler.enable(file=stack_file)
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True, chain=False)
    globals()["_stack_file"] = stack_file
    (folder / f"{name}.pid").write_text(str(os.getpid()))
    threading.Thread(target=_dump_when_asked, args=(folder, name), daemon=True).start()


def _dump_when_asked(folder: Path, name: str) -> None:
    while not (folder / "dump").exists():
        time.sleep(POLL_S)
    c10d = sys.modules.get("torch._C._distributed_c10d")
    dump = getattr(c10d, "_dump_nccl_trace", None)  # only in builds with NCCL or RCCL
    if dump is not None:
        (folder / f"{name}.flight.pickle").write_bytes(dump())
