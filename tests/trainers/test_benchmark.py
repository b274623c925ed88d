"""Timing settings keeps what it has when time runs out; the search takes the fastest microbatch that fits."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from programs import ends_with_its_run

import options as cli
from by_path import module_at
from tools import launch, tune

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))  # last: it has a train.py of its own
import ablation  # noqa: E402 - benchmarks/ has to be on the path


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


def test_the_fastest_and_not_the_largest_is_chosen(monkeypatch):
    planted(monkeypatch, {1: 10.0, 3: 30.0, 4: 20.0})
    found = tune.search(options("--candidates", "4,1,3"))
    assert found["chosen"] == 3
    assert [entry["micro_batch"] for entry in found["trace"]] == [1, 3, 4]


def test_out_of_memory_ends_the_search_and_another_failure_does_not(monkeypatch):
    hung, full = launch.RunError("did not end", None), launch.RunError("memory", tune.OUT_OF_MEMORY)
    tried = planted(monkeypatch, {1: 10.0, 2: hung, 4: full, 8: 99.0})
    found = tune.search(options("--candidates", "1,2,4,8"))
    assert tried == [1, 2, 4]
    assert [entry["outcome"] for entry in found["trace"]] == ["ran", "failed: did not end", "out of memory"]
    assert found["chosen"] == 1


def test_nothing_that_fits_is_a_failure(monkeypatch, capsys):
    planted(monkeypatch, {1: launch.RunError("memory", tune.OUT_OF_MEMORY)})
    assert tune.main(["--candidates", "1", "--run", "--", "--size", "tiny"]) == 1
    assert json.loads(capsys.readouterr().out)["chosen"] is None


@pytest.mark.slow
def test_the_jobs_record_holds_the_search():
    flags = ("--candidates", "1,2", "--run", "--", "--steps", "5", "--no-digest")
    command = [sys.executable, tune.__file__, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    record = json.loads(done.stdout)
    chosen = record["microbatch_search"]["chosen"]
    assert record["plan"]["micro_batch"] == chosen
    assert [entry["micro_batch"] for entry in record["microbatch_search"]["trace"]] == [1, 2]


def test_out_of_memory_of_a_rank_is_known_by_its_exit_code():
    report = "Other Failures:\n  exitcode  : -9 (pid: 16)\nRoot Cause (first):\n  exitcode  : 4 (pid: 17)"
    said = f"print({report!r}, file=sys.stderr); sys.exit(1)"
    with pytest.raises(launch.RunError) as caught:
        launch.run(launch.System("x", (sys.executable, "-c", f"import sys; {said}")), [], timeout_s=300)
    assert caught.value.code == tune.OUT_OF_MEMORY


def test_a_run_over_its_time_is_ended_and_its_phase_named():
    lines = "import time; print('[    1.0 s] compile', flush=True); time.sleep(60)"
    with pytest.raises(launch.RunError, match=r"did not end in 10 s in phase .*compile"):
        launch.run(launch.System("slow", (sys.executable, "-c", lines)), [], timeout_s=10)


TINY = "--size tiny --steps 6 --no-preflight"


def run(out: Path, *arguments: str) -> str:
    command = [sys.executable, BENCHMARKS / "train.py", "--out", out, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("base", sorted(ablation.BASES))
def test_each_lever_changes_the_base_and_is_a_flag_that_can_run(base):
    _, first, *others = ablation.settings(base, 1)
    settled = cli.parse(first.partition(":")[2].split())
    for setting in others:
        assert cli.parse(setting.partition(":")[2].split()) != settled, setting


@pytest.mark.slow
def test_a_failure_is_kept_beside_results_and_neither_is_run_again(tmp_path):
    settings = ("1", f"good: {TINY}", "bad: --size none")
    first = run(tmp_path / "out.jsonl", *settings)
    good, bad = (json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines())
    assert good["performance"]["tokens_per_s_per_gpu"] > 0
    assert "no preset" in bad["said"]
    assert "no preset" in first
    again = run(tmp_path / "out.jsonl", *settings)
    assert again.count("is in") == 2
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow  # two starts of torch; below, the words of a rank are read without one
def test_a_rank_that_raises_says_what_it_raised(tmp_path):
    said = run(tmp_path / "out.jsonl", "1", f"bad: {TINY} --record {tmp_path}")
    assert "IsADirectoryError" in said, said


CHAINED = """
import os, sys
print("a warning", file=sys.stderr)
try:
    try:
        {}["weights"]
    except KeyError as error:
        raise OSError("half of it was read") from error
except OSError:
    raise RuntimeError("the checkpoint is damaged")
"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_of_chained_exceptions_the_last_is_told(prefix):
    done = subprocess.run([sys.executable, "-c", CHAINED], capture_output=True, text=True, check=False)
    own = [line and prefix + line for line in done.stderr.splitlines()]
    torchruns = ["Traceback (most recent call last):", '  File "run.py", line 1', "ChildFailedError"]
    other = ["[rank2]: Traceback (most recent call last):", "[rank2]: RuntimeError: lost a peer"]
    said = launch.raised([*own, *other, *torchruns])
    assert "RuntimeError: the checkpoint is damaged" in said[-1], said
    assert not any("half of it" in line for line in said)
    alone = launch.raised([*other, *own, *torchruns])
    assert alone == other


def test_each_problem_stands_apart_in_the_line_of_a_setting():
    speed = {
        "unit": "tokens", "tokens_per_s_per_gpu": 1.0, "tflops_noncausal": 1.0, "tflops_causal": 1.0,
        "step_s": {"median": 1.0, "p5": 1.0, "p95": 1.0}, "timed_steps": 1,
    }  # fmt: skip
    record = {
        "performance": speed, "memory": None, "losses": [1.0], "first_step_s": 1.0,
        "extra": {"attention": {"backend": "cudnn"}, "where": {"kernel_ms": {"gemm": 3.0}}},
        "problems": ["a gradient norm is zero", "a loss is no number"],
    }  # fmt: skip
    said = module_at(BENCHMARKS / "train.py", "timing").line("x", 1, record)
    assert "attention cudnn  a gradient norm is zero  a loss is no number\n" in said


# Ranks that hang without using a processor, as those do that wait for a link.
HANGS = f"""
import sys, time
sys.path.insert(0, {str(launch.TRAIN.parent)!r})
import phases, train
enter = phases.Phases.enter
def entered(self, name):
    enter(self, name)
    if name == "timed":
        time.sleep(3600)
phases.Phases.enter = entered
sys.exit(train.main(sys.argv[1:]))
"""
WITH_ANOTHER_TRAINER = f"""
import runpy, sys
from pathlib import Path
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(launch.TRAIN.parent)!r}]
from tools import launch
launch.TRAIN = Path(sys.argv[1])
sys.argv = ["train.py", *sys.argv[2:]]
runpy.run_path({str(BENCHMARKS / "train.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_a_setting_that_hangs_is_ended_and_named_by_its_phase(tmp_path):
    hangs = tmp_path / "hangs.py"
    hangs.write_text(HANGS)
    program = [sys.executable, "-c", WITH_ANOTHER_TRAINER, hangs]
    for limit in ("40", "80", "160", "320"):  # on a busy machine the first ones end before the steps begin
        arguments = ["--out", tmp_path / f"{limit}.jsonl", "--limit-s", limit, "2", "slow: --size tiny"]
        done = subprocess.run([*program, *arguments], capture_output=True, text=True, check=True)
        said = done.stdout
        assert re.search(f"did not end in {limit} s (in phase |before its first phase)", said)
        if "timed" in said.partition("\n")[0]:
            break
    assert "timed" in said.partition("\n")[0], said
    assert said.count("train.py") >= 2, said
    assert said.count("most recent call first") >= 2, said  # the stacks of both ranks


def test_sigterm_ends_the_setting_that_runs_and_keeps_nothing_of_it(tmp_path):
    noted, out = tmp_path / "pid", tmp_path / "out.jsonl"
    program = f"""
import runpy, sys
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(launch.TRAIN.parent)!r}]
from tools import launch
launch.torchrun = lambda ranks: ("sh", "-c", "echo $$ > {noted}; exec sleep 600")
sys.argv = ["train.py", "--out", {str(out)!r}, "1", "long: --size tiny", "next: --size tiny"]
runpy.run_path({str(BENCHMARKS / "train.py")!r}, run_name="__main__")
"""
    ends_with_its_run(program, noted)
    assert not out.exists()


def test_nothing_starts_when_the_budget_is_spent(tmp_path):
    assert "not run: 5 s are left" in run(tmp_path / "out.jsonl", "--budget-s", "5", "1", f"late: {TINY}")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_table_tells_ratios_and_what_is_missing():
    missing = {"name": "fused, bf16 moments", "outcome": "x"}
    rows = ablation.table("fused", [result("fused", 100.0), result("fused, batch 1", 80.0), missing])
    assert "| fused, batch 1 | 80 | 0.800 |" in rows
    assert "| fused, bf16 moments | x |" in rows
    assert "| fused, fp32 reduction | not run |" in rows
    assert "CUDA graph of the step | not measured" in rows


def result(name: str, rate: float, **more: str) -> dict:
    speed = {"tokens_per_s_per_gpu": rate, "tflops_noncausal": 1.0}
    return {"name": name, **more, "performance": speed, "memory": None, "extra": {}, "problems": []}


def test_a_lever_is_compared_with_the_base_of_its_own_gpu():
    results = [result("fused", 100.0, gpu="0"), result("fused", 50.0, gpu="1")]
    results.append(result("fused, batch 1", 40.0, gpu="1"))
    again = result("fused", 40.0, gpu="0")  # another run: what comes after it is compared with it
    rows = ablation.table("fused", [*results, again, result("fused, fp32 reduction", 20.0, gpu="0")])
    assert "| fused, batch 1 | 40 | 0.800 |" in rows
    assert "| fused, fp32 reduction | 20 | 0.500 |" in rows


@pytest.mark.slow
def test_side_by_side_measures_the_base_on_each_gpu_and_each_lever_once(tmp_path):
    out = tmp_path / "out.jsonl"
    program = BESIDE.format(benchmarks=str(BENCHMARKS))
    command = [sys.executable, "-c", program, "--out", out, "--ablate", "tiny", "--beside", "0,1"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    results = [json.loads(line) for line in out.read_text().splitlines()]
    assert sorted(result["name"] for result in results) == ["tiny", "tiny", "tiny, one", "tiny, two"]
    assert {result["gpu"] for result in results if result["name"] == "tiny"} == {"0", "1"}
    assert all(result["performance"] for result in results)
    assert "| tiny, one |" in said


BESIDE = """
import sys
sys.path.insert(0, {benchmarks!r})
import ablation, train
flags = "--size tiny --steps 6 --no-preflight --device cpu"
ablation.BASES["tiny"] = (flags, {{"one": "--micro-batch 1", "two": "--no-compile"}})
train.main()
"""
