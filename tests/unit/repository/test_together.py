"""Commands that the test run has side by side: one failure is the failure of all, and none outlives it."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TOGETHER = Path(__file__).resolve().parents[3] / ".ci" / "together.py"


def start(*commands: str) -> subprocess.Popen[str]:
    words = [sys.executable, str(TOGETHER), *commands]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.parametrize("codes", [(0, 0), (3, 0), (0, 3), (3, 3)])
def test_it_succeeds_only_where_all_do_and_shows_one_output_after_the_other(codes: tuple[int, int]) -> None:
    first, second = codes
    process = start(f"echo a; sleep 0.3; echo b; exit {first}", f"echo c; exit {second}")
    out, _ = process.communicate(timeout=120)
    assert [line for line in out.splitlines() if len(line) == 1] == ["a", "b", "c"]
    assert out.count("exit code 3: ") == codes.count(3)
    assert process.returncode == (1 if any(codes) else 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_who_interrupts_it_ends_every_command_which_may_clean_up(
    number: signal.Signals, tmp_path: Path
) -> None:
    clean = "trap 'sleep 0.3; echo yes > {0}; exit' INT; echo up > {0}; while :; do sleep 0.05; done"
    said = [tmp_path / "first", tmp_path / "second"]
    process = start(*(clean.format(path) for path in said))
    deadline = time.monotonic() + 120
    while not all(path.exists() and path.read_text() for path in said) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert [path.read_text() for path in said] == ["yes\n", "yes\n"]


SIGNALLED_WHILE_IT_STARTS_ONE = """
import os, runpy, signal, subprocess, sys, time

class Slow(subprocess.Popen):
    def __init__(self, *words, **options):
        super().__init__(*words, **options)
        while not os.path.exists("up"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

subprocess.Popen = Slow
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_signal_between_the_start_of_a_command_and_its_note_leaves_nothing_running(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    commands = [f"echo $$ > {pid}; touch up; exec sleep 600", "true"]
    command = [sys.executable, "-c", SIGNALLED_WHILE_IT_STARTS_ONE, TOGETHER, *commands]
    process = subprocess.Popen(command, cwd=tmp_path)
    assert process.wait(timeout=120) == 128 + signal.SIGTERM
    assert not Path("/proc", pid.read_text().strip()).exists()
