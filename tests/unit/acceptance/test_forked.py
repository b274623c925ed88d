"""The end of a fork: its own finalizers run, those of the process that it was forked from do not."""

import subprocess
import sys
from pathlib import Path

ACCEPTANCE = Path(__file__).resolve().parents[2] / "acceptance"
PROGRAM = """
import atexit, os, weakref
from harness import forked

class Held: pass

kept = [Held()]
weakref.finalize(kept[0], print, "made before", flush=True)

def work():
    kept.append(Held())
    weakref.finalize(kept[1], print, "made in the fork", flush=True)
    atexit.register(print, "registered in the fork", flush=True)

if (pid := os.fork()) == 0:
    forked.run(work)
assert os.waitpid(pid, 0)[1] == 0
print("the fork ended", flush=True)
"""


def test_a_fork_finalizes_what_it_made_and_nothing_else() -> None:
    environment = {"PYTHONPATH": str(ACCEPTANCE), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True
    )
    before_its_end, _, after = ended.stdout.partition("the fork ended\n")
    assert sorted(before_its_end.splitlines()) == ["made in the fork", "registered in the fork"]
    assert after == "made before\n"
