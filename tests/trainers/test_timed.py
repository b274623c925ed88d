"""Time limits: what a run times, and that a program that is ended takes its runs with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import train

TOOLS = Path(train.__file__).parent


class Clock:
    def __init__(self) -> None:
        self.marks: list[int] = []

    def mark(self) -> None:
        self.marks.append(0)


def ended_at(flags: dict[str, float | None], after_s: list[float], monkeypatch: pytest.MonkeyPatch) -> int:
    """The step at which a run ends whose steps end so many seconds after its begin; its timed steps."""
    monkeypatch.setattr(train.energy, "joules", lambda _: None)
    given = {"warmup": 2, "warmup_s": 4.0, "budget_s": None, "timed_s": None, "last_step": 1000}
    nothing = SimpleNamespace(enter=lambda _: None, alive=lambda: None)
    run = SimpleNamespace(
        options=SimpleNamespace(**given | flags), first_step=0, phases=nothing, begin_s=0.0, clock=Clock(),
        first_step_s=None, stopped=False, joules=None, data_wait_s=[], store=None,
        compiled_at_s=0.0, timed_at_s=0.0,
    )  # fmt: skip
    for done, elapsed_s in enumerate(after_s, start=1):
        agreed = SimpleNamespace(agreed=lambda _, now=elapsed_s: (False, now))
        run.world = SimpleNamespace(stop=agreed, synchronize=lambda: None)
        if train.between_steps(run, done):
            break
    return len(run.clock.marks) - 1


def test_a_long_compilation_takes_nothing_from_the_warm_up_and_the_timed_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = [40.0 + second for second in range(100)]
    assert ended_at({"budget_s": 20.0}, compiled, monkeypatch) == -1, "nothing of --budget-s was left"
    assert ended_at({"timed_s": 10.0}, compiled, monkeypatch) == 10
    slow = [40.0 + 20.0 * step for step in range(100)]
    assert ended_at({"timed_s": 10.0}, slow, monkeypatch) == train.LEAST_TIMED


PROGRAM = """
import sys
from tools import launch
launch.stop_runs_on_sigterm()
launch.run(launch.System("long", ("sh", "-c", f"echo $$ > {sys.argv[1]}; exec sleep 600")), [], timeout_s=600)
"""


def test_sigterm_to_a_tool_ends_its_runs(tmp_path: Path) -> None:
    noted = tmp_path / "pid"
    tool = subprocess.Popen([sys.executable, "-c", PROGRAM, noted], cwd=TOOLS)
    try:
        limit = time.monotonic() + 60
        while not (noted.exists() and noted.read_text().strip()):
            assert time.monotonic() < limit
            time.sleep(0.05)
        tool.send_signal(signal.SIGTERM)
        assert tool.wait(60) == 128 + signal.SIGTERM
    finally:
        tool.kill()
        tool.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(noted.read_text()), 0)
