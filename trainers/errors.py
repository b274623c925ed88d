"""The ways in which a run is refused before it starts. In: a reason. Out: an error, or a program's end."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


class RefusedError(ValueError):
    """These arguments, this layout or this device cannot run; the message says what can. Exit code 2."""


class UnfitError(RuntimeError):
    """The machine failed its preflight: a job on it would measure the machine, not the
    software. Exit code 5.
    """


def require_torch(program: str) -> None:
    """End this program, a path, with one line and exit code 2 if its Python has no torch."""
    if importlib.util.find_spec("torch") is None:
        print(
            f"{Path(program).name}: {sys.executable} has no torch, which this program needs; run it inside "
            "an image that stackcheck made, or pip install torch for this Python",
            file=sys.stderr,
        )
        sys.exit(2)
