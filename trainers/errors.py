"""The ways in which a run is refused before it starts. In: a reason. Out: an error, or a program's end."""

from __future__ import annotations

import argparse
import atexit
import importlib.util
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn


class RefusedError(ValueError):
    """These arguments, this layout or this device cannot run; the message says what can. Exit code 2."""


class UnfitError(RuntimeError):
    """The machine failed its preflight: a job on it would measure the machine, not the software.

    Exit code 5.
    """


def said(line: str, code: int) -> int:
    """Say in one line why this rank ends, and the exit code, which is returned.

    Under torchrun the line is also in the error file of this rank, so that torchrun's report has it with its
    rank and exit code; torchrun itself always ends with 1. There only rank 0 prints it. The rank keeps this
    code if torchrun stops it before it has ended, because another rank was refused too.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the file is written whole
        told = {"py_callstack": line, "timestamp": str(int(time.time()))}  # the report shows py_callstack
        Path(path).write_text(
            json.dumps({"message": {"message": line, "extraInfo": told, "errorCode": code}})
        )
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # Python ends with the default again
    if path is None or os.environ.get("RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    return code


class Parser(argparse.ArgumentParser):
    """A parser of train.py's flags that refuses them in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        """End this process with exit code 2."""
        sys.exit(said(f"train.py: error: {message}", 2))


def require_torch(program: str) -> None:
    """End this program, a path, with one line and exit code 2 if its Python has no torch."""
    if importlib.util.find_spec("torch") is None:
        print(
            f"{Path(program).name}: {sys.executable} has no torch, which this program needs; run it inside "
            "an image that stackcheck made, or pip install torch for this Python",
            file=sys.stderr,
        )
        sys.exit(2)
