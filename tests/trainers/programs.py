"""Programs of this repository, as processes that a signal ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import waits


def ends_with_its_run(code: str, noted: Path, *arguments: str, cwd: Path | None = None) -> None:
    """SIGTERM ends this program, and the run whose process wrote its number into `noted`."""
    tool = subprocess.Popen([sys.executable, "-c", code, *arguments], cwd=cwd)
    try:
        waits.until(lambda: noted.exists() and noted.read_text().strip(), "a run")
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(waits.LIMIT_S) == 128 + signal.SIGTERM
    finally:
        tool.kill()
        tool.wait(timeout=waits.LIMIT_S)
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
