"""A small suite that runs with the real harness. In: a check, and what differs. Out: its result.json."""

import json
import os
from pathlib import Path

import planting

SUITE = '''
import time
import pytest
from harness.unfit import Unfit, invalid

def test_figure(record_metric):
    """A figure is kept."""
    conditions = {"dtype": "bf16", "m": 8192, "n": 8192, "k": 8192}
    record_metric("gemm_tflops", VALUE, unit="TFLOP/s", conditions=conditions, gate=True)

def test_figure_of_another_shape(record_metric):
    """No bound is for this shape."""
    conditions = {"dtype": "bf16", "m": 1, "n": 8192, "k": 8192}
    record_metric("gemm_tflops", VALUE, unit="TFLOP/s", conditions=conditions, gate=True)

def test_crash(on_device):
    on_device("work:crash")

def test_hang(on_device):
    on_device("work:hang", timeout_s=12)

def test_after(on_device):
    assert on_device("work:add", a=1, b=2) == 3

def test_invalid():
    invalid((Unfit("throttled", "throttled: hardware thermal", 0),))

@pytest.mark.gpus(2)
def test_ranks(launch):
    assert launch("PROGRAM", "sum", nproc=2, timeout_s=90)["sum"] == 3

@pytest.mark.gpus(2)
def test_hung_rank(launch):
    launch("PROGRAM", "hang", nproc=2, timeout_s=40)

@pytest.mark.gpus(2)
def test_dead_rank(launch):
    launch("PROGRAM", "die", nproc=2, timeout_s=90)

@pytest.mark.gpus(2)
def test_silent_ranks(launch):
    launch("PROGRAM", "silent", nproc=2, timeout_s=90)

@pytest.mark.last
def test_judges_the_run(whole_run, acceptance):
    earlier = len(acceptance.stages) - 1
    assert acceptance.ended._count(earlier) == earlier
    assert (acceptance.result_dir / "slow").exists()

def test_slow(acceptance):
    time.sleep(3)
    (acceptance.result_dir / "slow").touch()

@pytest.mark.tier("soak")
def test_late():
    pass
'''
WORK = """
import os, time
def add(a, b): return a + b
def crash(): os.abort()
def hang(): time.sleep(600)
"""
PROGRAM = """
import json, os, sys, time
rank = int(os.environ["RANK"])
if sys.argv[1] == "hang" and rank == 1: time.sleep(600)
if sys.argv[1] == "die" and rank == 1: sys.exit("rank 1 gives up")
if sys.argv[1] == "sum" and rank == 0: print(json.dumps({"sum": 3}))
"""


def run_suite(
    folder: Path, check: str, *arguments: str, value: str = "1.0", vendor: str = "cpu", env=None
) -> dict:
    """Run the suite in a copy of tests/acceptance, with the real conftest and harness."""
    copy = folder / "tests"
    if not copy.exists():
        copy.mkdir()
        for name in ("conftest.py", "pytest.ini"):
            (copy / name).write_bytes((planting.TESTS / name).read_bytes())
        (copy / "acceptance").mkdir()
        for part in ("harness", "vendors", "workloads", "thresholds", "devices.json", "conftest.py"):
            (copy / "acceptance" / part).symlink_to(planting.TESTS / "acceptance" / part)
    program = folder / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    (folder / "work.py").write_text(WORK, encoding="utf-8")
    suite = SUITE.replace("VALUE", value).replace("PROGRAM", str(program))
    (copy / "acceptance" / "test_planted.py").write_text(suite, encoding="utf-8")
    path = os.pathsep.join((str(folder), str(planting.STUBS)))
    target = copy / "acceptance" / ("test_planted.py" + (f"::{check}" if check else ""))
    ended = planting.PYTHON.pytest(
        *(str(target), "--gpu-vendor", vendor, *planting.LEAN),
        *("--result-dir", str(folder / "out"), "--lease-dir", str(folder / "leases"), *arguments),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(env or {})},
        folder=folder,
        timeout_s=planting.TIMEOUT_S,
    )
    result = json.loads((folder / "out" / "result.json").read_text(encoding="utf-8"))
    return {**result, "output": ended.stdout + ended.stderr, "exit": ended.returncode}


def only(result: dict) -> dict:
    (check,) = result["checks"]
    return check
