"""The end of a forked process. In: what it does. Out: nothing, because the process ends here.

A fork must not return into the code of the process that it was forked from.
"""

import atexit
import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import NoReturn

ALLOCATOR = "PYTORCH_ALLOC_CONF"


def tell_allocator() -> None:
    """Tell torch's allocator its setting in this fork; it reads the variable only while torch is loaded.

    The ranks of a launch call it, not the process that forks them: a device that it opened would be broken
    after their forks.
    """
    torch = sys.modules.get("torch")
    if torch is not None and (told := os.environ.get(ALLOCATOR)):
        newer = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (newer or torch.cuda.memory._set_allocator_settings)(told)


def run(function: Callable[[], object]) -> NoReturn:
    """Run a function, then end this process as an interpreter ends: exit code, traceback, exit functions."""
    code = 1
    try:
        leave_finalizers()
        gc.freeze()  # a fork has none of the threads that may belong to garbage of the forking process
        code = _exit_code(function)
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; there is no public way
        atexit._run_exitfuncs()
    # The end of a process: any error is written, and the code says that there was one.
    except BaseException as error:  # noqa: BLE001
        code = code or 1
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def leave_finalizers() -> None:
    """Leave what was to be finalized at the exit of the forking process to that process.

    torch takes back its Python operators there, one by one, in 30 ms of a processor; a fork that ends by
    `os._exit` has no use for that. What the fork makes itself is finalized as usual.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # there is no public way
        finalizer.atexit = False


def _exit_code(function: Callable[[], object]) -> int:
    try:
        function()
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0
