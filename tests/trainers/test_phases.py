"""A phase that hangs ends its process and says where, whatever a library did to sys.stderr."""

import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
HANGS = "import sys, io, time, phases; sys.stderr = {}; phases.Phases(0.5); time.sleep(60)"


@pytest.mark.parametrize("stderr", ["sys.stderr", "io.StringIO()", "None", "object()"])
def test_a_hang_is_told_whatever_stands_for_stderr(stderr):
    run = subprocess.run(
        (sys.executable, "-c", HANGS.format(stderr)),
        cwd=TRAINERS,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert run.returncode == 6
    assert "rank 0: import lasted more than 0.5 s" in run.stderr
    assert "most recent call first" in run.stderr
