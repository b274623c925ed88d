"""Under the launcher no code of an image runs before the suites, and pytest is the tool's own.

A virtual environment of this Python plays the image: it has a .pth file, a sitecustomize, a plug-in and a
pytest, and each of them leaves a file behind when it runs.
"""

import ast
import importlib.metadata
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import waits
from by_path import module_at
from stackcheck.suite import inputs, run, steering
from waits import run_program

SUITES_CONFTEST = Path(__file__).resolve().parents[2] / "conftest.py"

SUITE = """
import json, sys
import pytest

def test_it(pytestconfig):
    import site
    found = {"pytest": pytest.__file__, "prefix": sys.prefix, "path": sys.path, "executable": sys.executable,
             "timeout": pytestconfig.pluginmanager.hasplugin("pytest_timeout")}
    print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("frozen") / "runner"
    inputs.freeze_tools(target)
    return target


@pytest.fixture
def image(tmp_path) -> Path:
    """The image's Python."""
    folder = tmp_path / "venv"
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python3*/site-packages")
    mark = f"open({str(tmp_path)!r} + '/ran-' + NAME, 'w').close()"
    (site / "evil.pth").write_text(f"import sys; NAME = 'pth'; {mark}\n")
    for name in ("sitecustomize", "usercustomize", "pytest", "evil_plugin"):
        (site / f"{name}.py").write_text(f"NAME = {name!r}\n{mark}\n")
    (site / "evil-1.dist-info").mkdir()
    (site / "evil-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1\n")
    entries = ("evil", "timeout", "xdist", "pytest_timeout", "xdist.plugin")
    points = "\n".join(f"{name} = evil_plugin" for name in entries)
    (site / "evil-1.dist-info" / "entry_points.txt").write_text(f"[pytest11]\n{points}\n")
    (tmp_path / "test_it.py").write_text(SUITE)
    return folder / "bin" / "python3"


def ran(image: Path) -> set[str]:
    """Which code of the image ran."""
    return {path.name.removeprefix("ran-") for path in image.parents[2].glob("ran-*")}


def start(python: Path, *command: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {"PATH": os.environ["PATH"], "HOME": str(python.parents[2]), **steering.OURS, **env}
    words = [str(word) for word in (python, *command)]
    return run_program(words, env=clean, cwd=python.parents[2], timeout=120)


def test_no_code_of_the_image_runs_before_the_suites(image, runner):
    command = (*run.ISOLATED, runner / "launcher.py", "-m", "pytest", "-s", "test_it.py")
    done = start(image, *command, "-p", "no:cacheprovider")
    assert done.returncode == 0, done.stdout + done.stderr
    # The image has no metadata of pluggy, whose version pytest's header shows.
    assert f"pluggy-{importlib.metadata.version('pluggy')}" in done.stdout
    assert ran(image) == set()
    found = json.loads(done.stdout[done.stdout.index("{") :].splitlines()[0])
    assert found["pytest"] == str(runner / "pytest" / "pytest" / "__init__.py")
    assert found["timeout"]
    assert found["executable"] == str(image)
    assert found["prefix"] == str(image.parents[1])
    (site,) = image.parents[1].glob("lib/python3*/site-packages")
    assert found["path"].index(str(runner / "pytest")) < found["path"].index(str(site))


def test_the_same_image_runs_its_code_without_the_launcher(image):
    """What the launcher is for; a test that could not fail would prove nothing."""
    start(image, "-m", "pytest", "test_it.py")
    assert {"pth", "sitecustomize", "pytest"} <= ran(image)


def test_a_worker_of_xdist_starts_alike(image, runner):
    command = (*run.ISOLATED, runner / "launcher.py", "-u", "-c")
    done = start(image, *command, "import sys, pytest; print(pytest.__file__, sys.argv)")
    assert done.stdout.split() == [str(runner / "pytest" / "pytest" / "__init__.py"), "['-c']"], done.stderr
    assert ran(image) == set()


def test_the_launcher_runs_nothing_else(image, runner):
    done = start(image, *run.ISOLATED, runner / "launcher.py", "script.py", "x")
    assert done.returncode == 1
    assert "expected -m MODULE or -c CODE" in done.stderr


def test_the_toolkit_has_modules_and_no_metadata(runner):
    assert not list((runner / "pytest").glob("*.dist-info"))
    for name in ("pytest", "_pytest", "pluggy", "execnet", "xdist", "exceptiongroup"):
        assert (runner / "pytest" / name / "__init__.py").exists(), name
    assert (runner / "pytest" / "pytest_timeout.py").exists()


def test_a_python_of_the_oldest_images_can_parse_the_launcher():
    ast.parse(inputs.LAUNCHER.read_text(), feature_version=(3, 10))


@pytest.fixture
def conftest() -> Any:
    """The module of the suites' conftest.py."""
    return module_at(SUITES_CONFTEST, "suites_conftest")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 16),
        ({"cpu.max": "max 100000"}, 16),
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 16),
        ({"cpu/cpu.cfs_quota_us": "250000", "cpu/cpu.cfs_period_us": "100000"}, 2),
    ],
    ids=str,
)
def test_a_containers_quota_of_processors_limits_the_workers(conftest, files, cores, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert conftest._cores(tmp_path) == cores


def test_the_workers_of_xdist_are_started_by_the_launcher_too(conftest, monkeypatch):
    command = ["/opt/my venv/bin/python3", *run.ISOLATED, f"{run.RUNNER}/launcher.py"]
    option = SimpleNamespace(tx=["popen", "popen"])
    for started, expected in (
        (["python", "-m", "pytest"], ["popen", "popen"]),
        ([*command, "-m", "pytest", "-n2"], [f"popen//python={shlex.join(command)}"] * 2),
    ):
        monkeypatch.setattr(sys, "orig_argv", started)
        conftest._start_workers_alike(SimpleNamespace(option=option))
        assert option.tx == expected


def test_a_launched_process_ends_when_its_parent_was_killed(runner):
    """A run whose tool was killed left it waiting for a container that was gone."""
    launched = [sys.executable, *run.ISOLATED, str(runner / "launcher.py"), "-c"]
    code = "import time; print('ready', flush=True); time.sleep(3600)"
    parent = f"import subprocess; subprocess.run({[*launched, code]!r}, check=True)"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as started:
        assert waits.line(started.stdout) == "ready\n"
        started.kill()
        assert waits.line(started.stdout) == ""  # it ends with the last process that holds the pipe
