"""A signal that comes when a verb is over ends the program without a word: no traceback, no other message."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LATE = "import atexit, os; from stackcheck.cli import main; atexit.register(os.kill, os.getpid(), {}); main()"
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
ENDINGS = [("list", ""), ("nope", "no such command"), ("lock nope", "next:")]


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(("verb", "said"), ENDINGS)
def test_a_signal_to_an_interpreter_that_ends_is_no_traceback(
    verb: str, said: str, number: signal.Signals
) -> None:
    command = [sys.executable, "-c", LATE.format(int(number)), *verb.split()]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=60,
        preexec_fn=lambda: [signal.signal(known, signal.SIG_DFL) for known in SIGNALS],
    )
    assert done.returncode == -number
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert bool(done.stderr) == bool(said)
