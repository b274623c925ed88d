"""Limits of time follow vendor and ranks: they tell a hang from slow work, and AMD's first calls search."""

import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import vendors
from harness import launch, overdue, processes, server
from harness.check import Check
from harness.session import AcceptanceSession
from workloads import time_limits


@pytest.mark.parametrize(
    ("vendor", "ranks", "limit"),
    [
        ("nvidia", 1, 120),
        ("nvidia", 4, 120),
        ("nvidia", 8, 240),
        ("amd", 1, 360),
        ("amd", 8, 720),
        ("cpu", 2, 120),
    ],
)
def test_limits_grow_with_vendor_and_ranks(vendor, ranks, limit):
    session = cast("Any", SimpleNamespace(vendor=vendor))
    assert AcceptanceSession.limit_s(session, 120, ranks) == limit


def test_no_vendor_shortens_a_limit():
    assert all(vendors.module(name).TIME_LIMIT_FACTOR >= 1 for name in vendors.VENDORS)


def test_the_limits_inside_a_workload_grow_alike(monkeypatch):
    """A rank that gives up earlier than its launch would end a healthy run all the same."""
    monkeypatch.delenv(processes.PATIENCE, raising=False)
    assert time_limits.scaled(60) == 60
    session = cast("Any", SimpleNamespace(vendor="amd"))
    monkeypatch.setenv(processes.PATIENCE, f"{AcceptanceSession.limit_s(session, 1, 8):g}")
    assert time_limits.scaled(60) == 360
    assert time_limits.VARIABLE == processes.PATIENCE
    assert processes.PATIENCE in server.READ_WHEN_USED  # or each launch would load torch anew


def test_no_workload_has_a_limit_that_does_not_grow():
    """Every limit of a workload passes through `scaled`; what a check itself asks for does not."""
    asked = {"collective_hang.py": "limit_s = options.timeout_s"}  # how soon the library has to give up
    for path in sorted(Path(time_limits.__file__).parent.glob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            made = "Phases(" in line or "timeout=dt.timedelta(" in line or "monotonic() + LIMIT_S" in line
            own = path.name in asked and "options.timeout_s" in line
            assert not made or own or "scaled(" in line, f"{path.name}: {line.strip()}"


class Ended:
    """A child that ended with a code, or that does not end."""

    pid, returncode = 2**22, None

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code

    def wait(self, timeout: float | None = None) -> int:
        if self.code is None:
            raise subprocess.TimeoutExpired("torchrun", timeout or 0.0)
        return self.code


@pytest.mark.parametrize(
    ("code", "says", "error"),
    [
        (None, "", processes.TimeLimitError),
        (1, "rank 0: compile lasted more than 450 s", processes.TimeLimitError),  # trainers/phases.py
        (1, "TimeoutError: ranks [1] did not reach the barrier within 90 s", processes.TimeLimitError),
        (1, "[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(", processes.TimeLimitError),
        (1, "DistStoreError: wait timeout after 180000ms, keys: /group", processes.TimeLimitError),
        (1, "RuntimeError: HIP error: invalid device function", processes.WorkloadError),
        (-11, "", processes.WorkloadError),
    ],
)
def test_what_the_clock_ended_is_told_from_what_failed(code, says, error, tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "kill", lambda *_: [])
    monkeypatch.setattr(processes, "keep_stacks", lambda *_: "")
    (tmp_path / "stderr.txt").write_text(f"[rank1]: {says}\n" + "[rank0]: a line\n" * 40)
    (tmp_path / "stdout.txt").write_text("")
    child = cast("Any", Ended(code))
    with pytest.raises(pytest.fail.Exception) as failed, overdue.failing(lambda: "not clean"):
        launch._record_of(child, "training.py", "token", tmp_path, 360)
    assert isinstance(failed.value, overdue.OverdueError) == (error is processes.TimeLimitError)
    assert str(failed.value).endswith("not clean")


def test_every_workload_whose_limit_grows_says_so_in_known_words():
    """A rank that its own limit ends must not look like one that failed."""
    said = {
        "collective_timing.py": "did not reach the barrier within",
        "training.py": "Phases(",  # trainers/phases.py: "lasted more than"
        "trainer_jobs.py": "Phases(",
        "layout_peaks.py": "Phases(",
        "ranks.py": "init_process_group(",  # torch's own words
        "collective_groups.py": '"stuck": True',  # test_collectives reads it
        "generated_collectives.py": 'entry["hung"] = ',  # and this
        "generated_context.py": 'report["hung"] = ',  # test_placements reads it
        "generated_environments.py": 'report["hung"] += ',  # test_environments reads it
        "generated_layouts.py": '"hung": hung',  # test_layouts reads it
        "generated_placement_cases.py": "WAIT_S",  # of torch's groups; the next one has the words
        "own_tests.py": '"hung": sum(',  # test_own_tests reads it
        "generated_placements.py": 'entry["hung"] = ',  # test_placements reads it
    }
    folder = Path(time_limits.__file__).parent
    grows = {
        path.name
        for path in folder.glob("*.py")
        if path.name != "time_limits.py" and re.search(r"\bscaled\(", path.read_text(encoding="utf-8"))
        if "import scaled" in path.read_text(encoding="utf-8")
    }
    assert grows == said.keys()
    for name, words in said.items():
        assert words in (folder / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("raised", "cause"),
    [
        (overdue.OverdueError("late"), "time_limit"),
        (pytest.fail.Exception("wrong"), None),
        (KeyError(), "exception"),
    ],
    ids=str,
)
def test_the_cause_of_a_check_is_the_clocks_only_if_the_clock_ended_it(raised, cause):
    found = Check(vendor="amd", model="MI300X")
    AcceptanceSession._note(cast("Any", SimpleNamespace(host=None)), found, raised)
    assert found.cause == cause
