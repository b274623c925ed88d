"""torchrun, with ranks that are forks of this process. In: its options, a program, arguments. Out: an exit
code.

The agent and its rendezvous are torchrun's own, with its option `--start-method fork`. Each rank runs the
program as `harness.rank` does, and loads nothing again that this process has loaded.
"""

import ctypes
import os
import signal
import sys
import uuid

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import elastic_launch

from harness import forked, rank

PR_SET_PDEATHSIG = 1  # prctl(2)


@record  # type: ignore[untyped-decorator,unused-ignore]  # torch's decorator has no types before 2.6
def main() -> None:
    """Run the ranks to their end. Raises `ChildFailedError` if one failed."""
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", uuid.uuid4().hex)
    options = run.parse_args([*endpoint, "--start-method", "fork", *sys.argv[1:]])
    config, _, _ = run.config_from_args(options)
    elastic_launch(config=config, entrypoint=_ranked)(options.training_script, options.training_script_args)


def _ranked(program: str, arguments: list[str]) -> None:
    """One rank. A fork runs the program: torchrun waits for ever for a function that calls `os._exit`."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # torchrun's own handlers are for torchrun
    if pid := os.fork():
        _end_as(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # torchrun kills the other process only
    sys.argv = [str(rank.__file__), program, *arguments]
    forked.run(rank.main)


def _end_as(code: int) -> None:
    """End this process as another one ended; return after exit code 0."""
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    if code:
        os._exit(code)  # an exception would leave a file of torch's in the temporary folder


if __name__ == "__main__":
    main()
