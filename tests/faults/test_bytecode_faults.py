"""The bytecode cache of a run: it is made only where torch has none, and deleted with the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import planting

pytestmark = pytest.mark.catches("the harness")
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
def torch(tmp_path: Path) -> Path:
    """A folder with a package torch that was installed without byte code."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("VALUE = 1\n", encoding="utf-8")
    return tmp_path


def test_environment_without_byte_code_gets_a_folder_of_the_run_alone(torch) -> None:
    found = run_beside(torch)
    assert Path(found["kept"]).name.startswith("stackcheck-bytecode-")
    assert found["cached"].startswith(found["kept"])
    assert found["there"]
    assert found["writes"]
    assert not Path(found["kept"]).exists(), "the folder outlived its run"
    assert not list(torch.rglob("__pycache__"))


@pytest.mark.healthy
def test_environment_with_byte_code_is_left_as_it_is(torch) -> None:
    subprocess.run((sys.executable, "-m", "compileall", "-q", str(torch)), check=True)
    found = run_beside(torch)
    assert found["kept"] is None
    assert not found["writes"]
    assert found["cached"].startswith(str(torch))


@pytest.mark.healthy
def test_folder_that_a_user_named_is_left_to_the_user(torch, tmp_path) -> None:
    found = run_beside(torch, PYTHONPYCACHEPREFIX=str(tmp_path / "mine"))
    assert found["kept"] == str(tmp_path / "mine")
    assert not found["writes"]
    assert not found["there"]
