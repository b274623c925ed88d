"""What an image's Python runs in place of pytest. In: `-m MODULE …` or `-c CODE`. Out: what that does.

Nothing imports this file: `stackcheck.suite.run` mounts it beside the tool's own pytest and starts it with
`python3 -I -S`, so that no code of the image runs in this process before the suites: no .pth file, no
sitecustomize or usercustomize, no pytest, no plug-in. Children that load torch start like a user's Python.
pytest-xdist starts its workers by the same command (tests/conftest.py), with `-u -c CODE`.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import site
import sys
import threading
import time
from pathlib import Path

TOOLKIT = str(Path(__file__).resolve().parent / "pytest")
POLL_S, END_S = 1.0, 30.0
FLAGS = ("-u", "-B")  # pytest-xdist passes them; the command that starts this file has them already


def main() -> None:
    """Set up the import path, then run what the arguments name."""
    threading.Thread(target=_end_with, args=[os.getppid()], daemon=True).start()
    _add_site_packages()
    sys.path.insert(0, TOOLKIT)
    _ignore_entry_points()
    option, what, *rest = [argument for argument in sys.argv[1:3] if argument not in FLAGS] + sys.argv[3:]
    if option == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif option == "-c":
        sys.argv = ["-c", *rest]
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102  # as `python -c` does
    else:
        sys.exit(f"expected -m MODULE or -c CODE, got {option}")


def _end_with(parent: int) -> None:
    """When the parent was killed, nobody waits for the suites: end in order, and if that fails at once."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(END_S)
    os._exit(1)


def _add_site_packages() -> None:
    """What `site` does at a normal start, except that it runs no code of the image."""
    for name in ("addpackage", "execsitecustomize", "execusercustomize"):
        setattr(site, name, _nothing)
    site.main()


def _ignore_entry_points() -> None:
    """Even for a plug-in that is named, pytest first asks the entry points of the image's packages.

    pluggy would also ask the image's metadata for its own version, which an image without pytest has not.
    """
    pluggy = importlib.import_module("pluggy")
    pluggy.PluginManager.load_setuptools_entrypoints = _nothing
    vars(pluggy)["__version__"] = Path(__file__).with_name("pluggy.version").read_text(encoding="utf-8")


def _nothing(*_arguments: object, **_options: object) -> int:
    return 0  # how many entry points were loaded


if __name__ == "__main__":
    main()
