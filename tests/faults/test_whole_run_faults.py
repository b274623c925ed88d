"""Faults of a whole run: its judge runs last, a lost listener is noticed, its bytecode cache is deleted."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import planting
from by_path import module_at
from harness import order
from harness.listener import Listener
from planted_suite import run_suite

pytestmark = pytest.mark.catches("the harness")


@pytest.mark.healthy
@pytest.mark.parametrize("workers", ["0", "2"])
def test_check_of_the_whole_run_comes_after_every_other_one(tmp_path, workers, suite_python):
    assert suite_python
    result = run_suite(
        tmp_path, "", "-n", workers, "--dist", "load", "-k", "judges or slow or after or invalid"
    )
    outcomes = {check["id"].rpartition("::")[2]: check["outcome"] for check in result["checks"]}
    assert outcomes.pop("test_judges_the_run") == "passed", result["output"]
    assert len(outcomes) == 3
    judged = next(check for check in result["checks"] if check["id"].endswith("judges_the_run"))
    assert judged["evidence"]["before"]
    assert judged["evidence"]["after"]


def test_check_that_never_ends_is_not_waited_for_without_end(tmp_path):
    ended = order.Ended(tmp_path / "ended")
    ended.add(0)
    assert ended.wait_for(1, stall_s=0.1)
    assert not ended.wait_for(2, stall_s=0.3)


@pytest.mark.healthy
def test_check_that_said_how_long_it_lasts_is_waited_for(tmp_path):
    ended = order.Ended(tmp_path / "ended")
    ended.expect(30.0)
    threading.Timer(0.5, ended.add, (0,)).start()
    assert ended.wait_for(1, stall_s=0.1)


def test_check_that_ended_is_not_waited_for_any_longer(tmp_path):
    ended = order.Ended(tmp_path / "ended")
    ended.expect(30.0)
    ended.add(0)
    began = time.monotonic()
    assert not ended.wait_for(2, stall_s=0.1)
    assert time.monotonic() - began < 25


def test_check_that_hangs_beyond_what_it_said_is_not_waited_for(tmp_path):
    ended = order.Ended(tmp_path / "ended")
    ended.expect(0.2)
    assert not ended.wait_for(1, stall_s=0.1)


def test_listener_that_cannot_start_is_known_as_gone(tmp_path):
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("no-such-vendor")
    reports = listener.reports()
    listener.stop()
    assert not reports.listening
    assert "unknown vendor" in reports.error


def test_listener_ends_with_the_run_that_started_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(planting.STUBS))
    listener = Listener(tmp_path / "faults.jsonl")
    listener.start("nvidia")
    assert listener.reports().listening
    listener.stop()
    assert not listener.reports().listening


def item(
    file: str,
    count: int = 0,
    *,
    last: bool = False,
    perf: bool = False,
    whole: bool | None = None,
    exclusive: bool = False,
    long: bool = False,
) -> SimpleNamespace:
    """The parts of a collected check that decide its place in the run."""
    kwargs = {"perf": perf, "whole": whole, "exclusive": exclusive}
    marks = {"last": last, "long": long, "gpus": count and SimpleNamespace(args=(count,), kwargs=kwargs)}
    return SimpleNamespace(path=Path(file), get_closest_marker=lambda name: marks.get(name) or None)


@pytest.mark.healthy
@pytest.mark.parametrize(
    ("most", "files"),
    [
        (4, "texts kernels training all judge"),
        (2, "texts kernels all training judge"),
        (1, "texts all training kernels judge"),
    ],
)
def test_files_of_few_devices_fill_the_machine_before_those_that_need_most_of_it(most, files):
    collected = [
        item("judge", last=True),
        item("all", most),
        item("speed", most, perf=True),
        item("texts"),
        item("training", min(2, most)),
        item("training", most, perf=True),
        item("kernels", 1),
        item("kernels", most),
    ]
    placed = order.ordered(collected)
    assert list(dict.fromkeys(str(one.path) for one in placed if one.path != Path("speed"))) == files.split()
    speeds = [order.is_performance(one) for one in placed]
    assert speeds == [*sorted(speeds[:-1]), False], "performance follows correctness, and the judge is last"


@pytest.mark.healthy
def test_long_checks_begin_early_and_those_that_share_no_device_follow():
    """On an H100 an exclusive check that began early kept all others waiting for 80 s."""
    alone = [item("whole", 1, whole=True), item("alone", 1, exclusive=True)]
    placed = [one.path.name for one in order.ordered([*alone, item("short", 1), item("long", 1, long=True)])]
    assert placed == ["long", "short", "whole", "alone"]


@pytest.mark.healthy
def test_jobs_that_share_every_device_begin_first():
    collected = [item("kernels", 1, long=True), item("training", 2), item("training", 2, whole=False)]
    placed = [(one.path.name, order.wish(one).use) for one in order.ordered(collected)]
    assert placed == [("training", "shared"), ("kernels", "shared"), ("training", "whole")]


@pytest.mark.parametrize(
    ("marks", "use"),
    [
        ({"count": 1}, "shared"),
        ({"count": 1, "whole": True}, "whole"),
        ({"count": 2}, "whole"),
        ({"count": 2, "whole": False}, "shared"),
        ({"count": 1, "perf": True}, "quiet"),
        ({"count": 2, "perf": True}, "alone"),
    ],
)
def test_what_may_run_beside_a_check_follows_from_its_mark(marks, use):
    assert order.wish(item("a", **marks)).use == use


def test_only_files_whose_checks_share_no_launch_are_spread_over_workers():
    training = "acceptance/test_training.py"
    assert order.scope(f"{training}::test_a[2]", 2) == training
    assert order.scope(f"{training}::test_throughput[2]", 2) == f"{training}::whole"
    for name in order.INDEPENDENT:
        text = (planting.TESTS / "acceptance" / name).read_text(encoding="utf-8")
        assert 'scope="module"' not in text, f"{name}: its checks share what one worker keeps"
        checks = (f"acceptance/{name}::test_a[1]", f"acceptance/{name}::test_a[2]")
        assert tuple(order.scope(check, 2) for check in checks) == checks


def test_speed_checks_of_the_only_device_stay_in_one_worker():
    check = "acceptance/test_kernel_speed.py::test_copy_speed"
    assert order.scope(check, 2) == check
    assert order.scope(check, 1) == "acceptance/test_kernel_speed.py::speed"


def parallel(monkeypatch, *, cores: int, plugins=("xdist",), worker: bool = False, **given) -> tuple:
    """How many workers a run gets, and how files are distributed, by its options."""
    conftest = module_at(planting.TESTS / "conftest.py", "conftest_of_tests")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    asked = {"gpu_vendor": "nvidia", "keyword": "", "markexpr": "", "collectonly": False, "usepdb": False}
    arguments = given.pop("args", [str(planting.TESTS)])
    option = SimpleNamespace(**asked | {"numprocesses": None, "dist": "no", "loadscopereorder": True} | given)
    config = SimpleNamespace(
        option=option,
        args=arguments,
        getoption=lambda name: getattr(option, name),
        pluginmanager=SimpleNamespace(hasplugin=plugins.__contains__),
        invocation_params=SimpleNamespace(dir=Path("/")),
        **({"workerinput": {}} if worker else {}),
    )
    conftest.pytest_cmdline_main(config)
    return option.numprocesses, option.dist, option.loadscopereorder


AS_ASKED = (None, "no", True)


@pytest.mark.healthy
def test_whole_run_goes_file_by_file_in_several_workers(monkeypatch):
    assert parallel(monkeypatch, cores=64) == (16, "loadfile", False)
    assert parallel(monkeypatch, cores=16) == (8, "loadfile", False)
    assert parallel(monkeypatch, cores=64, numprocesses=3) == (3, "loadfile", False)
    assert parallel(monkeypatch, cores=2, gpu_vendor="cpu") == (2, "loadfile", False)


@pytest.mark.healthy
@pytest.mark.parametrize(
    "run",
    [
        {"cores": 3},
        {"cores": 1, "gpu_vendor": "cpu"},
        {"cores": 64, "gpu_vendor": None},
        {"cores": 64, "keyword": "gemm"},
        {"cores": 64, "usepdb": True},
        {"cores": 64, "args": [str(planting.TESTS / "acceptance/test_kernels.py")]},
        {"cores": 64, "plugins": ()},
        {"cores": 64, "worker": True},
    ],
    ids=[
        "few cores",
        "one core",
        "own tests",
        "chosen checks",
        "debugger",
        "one file",
        "no xdist",
        "in a worker",
    ],
)
def test_any_other_run_goes_one_by_one(monkeypatch, run):
    workers, dist, reorder = parallel(monkeypatch, **run)
    assert (workers or None, dist, reorder) == AS_ASKED


@pytest.mark.healthy
def test_what_the_user_says_of_workers_stands(monkeypatch):
    assert parallel(monkeypatch, cores=64, numprocesses=0) == (0, "no", True)
    assert parallel(monkeypatch, cores=64, numprocesses=2, dist="load") == (2, "load", True)


RUN = """
import json, os, subprocess, sys, tempfile
sys.dont_write_bytecode = True
from harness import bytecode, processes
from pathlib import Path
bytecode.keep()
env = processes.environment({}, "token", Path(tempfile.gettempdir()))
child = [sys.executable, "-c", "import sys, torch; print(torch.__cached__)"]
cached = subprocess.run(child, env=env, capture_output=True, text=True, check=True).stdout.strip()
found = {"kept": sys.pycache_prefix, "cached": cached, "there": Path(cached).is_file()}
print(json.dumps({**found, "writes": not sys.dont_write_bytecode}))
"""


def run_beside(torch: Path, **env: str) -> dict:
    """What a run and its child keep, with a package of that name in a folder."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    path = os.pathsep.join((str(torch), str(planting.TESTS / "acceptance")))
    command = (sys.executable, "-c", RUN)
    environment = {**plain, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **env}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout)


@pytest.fixture
def torch(tmp_path) -> Path:
    """A folder with a package torch that was installed without byte code."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    return tmp_path


def test_environment_without_byte_code_gets_a_folder_of_the_run_alone(torch):
    found = run_beside(torch)
    assert Path(found["kept"]).name.startswith("stackcheck-bytecode-")
    assert found["cached"].startswith(found["kept"])
    assert found["there"]
    assert found["writes"]
    assert not Path(found["kept"]).exists(), "the folder outlived its run"
    assert not list(torch.rglob("__pycache__"))


@pytest.mark.healthy
def test_environment_with_byte_code_is_left_as_it_is(torch):
    subprocess.run((sys.executable, "-m", "compileall", "-q", str(torch)), check=True)
    found = run_beside(torch)
    assert found["kept"] is None
    assert not found["writes"]
    assert found["cached"].startswith(str(torch))


@pytest.mark.healthy
def test_folder_that_a_user_named_is_left_to_the_user(torch, tmp_path):
    found = run_beside(torch, PYTHONPYCACHEPREFIX=str(tmp_path / "mine"))
    assert found["kept"] == str(tmp_path / "mine")
    assert not found["writes"]
    assert not found["there"]
