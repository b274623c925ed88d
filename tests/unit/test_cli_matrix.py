from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _run(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stackcheck", *arguments, "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy(ROOT / "matrix.yaml", tmp_path)
    return tmp_path


def test_list_json_names_every_stack_with_vendor_and_state():
    stacks = json.loads(_run("list", "--json").stdout)["stacks"]
    assert {"cpu", "amd", "nvidia"} == {stack["vendor"] for stack in stacks}
    assert {"locked", "unlocked"} == {stack["state"] for stack in stacks}


def test_explain_json_is_the_contract_and_exits_0_for_a_refusal():
    done = _run("explain", "rocm=7.2", "torch=2.6.0", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 0
    assert answer["allowed"] is False
    assert {"id", "holds", "because", "source"} <= answer["rules"][0].keys()
    assert answer["nearest"]


def test_explain_takes_a_stack_of_the_matrix():
    done = _run("explain", "rocm7.2.4-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04")
    assert done.returncode == 0
    assert ": allowed" in done.stdout
    assert "holds  R1-upstream-rocm[2.13.0]" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("list", "nothing*"), 3),
        (("explain", "colour=red"), 2),
        (("compat", "mend"), 2),
        (("compat", "check"), 0),
    ],
)
def test_exit_codes(arguments: tuple[str, ...], code: int):
    done = _run(*arguments)
    assert done.returncode == code
    assert "Traceback" not in done.stderr


def test_a_wrong_matrix_is_exit_2_with_its_place_and_no_traceback(checkout: Path):
    path = checkout / "matrix.yaml"
    path.write_text(
        path.read_text().replace("torch: 2.13.0\n    python: 3.11", "torch: two\n    pyhton: 3.11", 1)
    )
    done = _run("list", root=checkout)
    assert done.returncode == 2
    assert "matrix.yaml: stacks[0].torch[0]: " in done.stderr
    assert "matrix.yaml: stacks[0].pyhton: " in done.stderr
    assert "Traceback" not in done.stderr


def test_render_check_fails_on_drift_and_render_mends_it(checkout: Path):
    assert _run("render", "--check", root=checkout).returncode == 0
    next(checkout.glob("images/cpu-*/Dockerfile")).write_text("FROM scratch\n")
    assert _run("render", "--check", root=checkout).returncode == 2
    assert _run("render", root=checkout).returncode == 0
    assert _run("render", "--check", root=checkout).returncode == 0
