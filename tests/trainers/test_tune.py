"""The microbatch search takes the fastest that fits, stops at the first that does not, and tells all."""

import json
import subprocess
import sys

import pytest

from tools import launch, tune


def options(*words: str):
    return tune._parser().parse_args([*words, "--", "--size", "tiny"])


def planted(monkeypatch: pytest.MonkeyPatch, rates: dict[int, object]) -> list[int]:
    tried: list[int] = []

    def run(_where: object, flags: list[str], *, timeout_s: float) -> dict:
        assert timeout_s > 0
        size = int(flags[flags.index("--micro-batch") + 1])
        tried.append(size)
        if isinstance(rates[size], Exception):
            raise rates[size]
        speed = {"unit": "tokens", "tokens_per_s_per_gpu": rates[size]}
        return {"problems": [], "performance": speed, "memory": None, "size": size}

    monkeypatch.setattr(launch, "run", run)
    return tried


def test_the_fastest_and_not_the_largest_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, {1: 10.0, 3: 30.0, 4: 20.0})
    found = tune.search(options("--candidates", "4,1,3"))
    assert found["chosen"] == 3
    assert [entry["micro_batch"] for entry in found["trace"]] == [1, 3, 4]


def test_out_of_memory_ends_the_search_and_another_failure_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    hung, full = launch.RunError("did not end", None), launch.RunError("memory", tune.OUT_OF_MEMORY)
    tried = planted(monkeypatch, {1: 10.0, 2: hung, 4: full, 8: 99.0})
    found = tune.search(options("--candidates", "1,2,4,8"))
    assert tried == [1, 2, 4]
    assert [entry["outcome"] for entry in found["trace"]] == ["ran", "failed: did not end", "out of memory"]
    assert found["chosen"] == 1


def test_nothing_that_fits_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(monkeypatch, {1: launch.RunError("memory", tune.OUT_OF_MEMORY)})
    assert tune.main(["--candidates", "1", "--run", "--", "--size", "tiny"]) == 1
    assert json.loads(capsys.readouterr().out)["chosen"] is None


@pytest.mark.slow
def test_the_jobs_record_holds_the_search() -> None:
    flags = ("--candidates", "1,2", "--run", "--", "--steps", "5", "--no-digest")
    command = [sys.executable, tune.__file__, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    chosen = record["microbatch_search"]["chosen"]
    assert record["plan"]["micro_batch"] == chosen
    assert [entry["micro_batch"] for entry in record["microbatch_search"]["trace"]] == [1, 2]


def test_out_of_memory_of_a_rank_is_known_by_its_exit_code() -> None:
    report = "Other Failures:\n  exitcode  : -9 (pid: 16)\nRoot Cause (first):\n  exitcode  : 4 (pid: 17)"
    said = f"print({report!r}, file=sys.stderr); sys.exit(1)"
    with pytest.raises(launch.RunError) as caught:
        launch.run(launch.System("x", (sys.executable, "-c", f"import sys; {said}")), [], timeout_s=300)
    assert caught.value.code == tune.OUT_OF_MEMORY


def test_a_run_over_its_time_is_ended_and_its_phase_named() -> None:
    lines = "import time; print('[    1.0 s] compile', flush=True); time.sleep(60)"
    with pytest.raises(launch.RunError, match=r"did not end in 10 s in phase .*compile"):
        launch.run(launch.System("slow", (sys.executable, "-c", lines)), [], timeout_s=10)
