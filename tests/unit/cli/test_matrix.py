from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stackcheck.cli import matrix as cli_matrix

ROOT = Path(__file__).parents[3]


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


def test_list_json_names_what_each_stack_is_made_of_and_tested_on():
    stacks = {stack["id"]: stack for stack in json.loads(_run("list", "--json").stdout)["stacks"]}
    stack = stacks["rocm6.2.4-torch2.6.0-fa2.7.4.post1-py3.10-ubuntu22.04"]
    assert (stack["wheels"], stack["triton"]) == ("upstream", "pytorch-triton-rocm==3.2.0")
    assert (stack["collective"], stack["flash_attn"]) == ("rccl==2.20.5", "2.7.4.post1")
    assert stack["tested_on"][0] == {"device": "MI250X", "count": 8, "driver": "6.2"}
    known = {issue["id"]: issue for issue in stack["known_issues"]}
    assert known["K-aotriton-float-mask"]["fixed_in"] == "torch 2.7.0"
    assert known["K-aotriton-float-mask"]["issue"] == "pytorch/pytorch#147460"


def test_outdated_names_each_pin_that_an_index_has_a_newer_version_of_and_its_stacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    newest = {"numpy": "2.4.6", "torch": "2.13.0", "flash-attn": "2.9.0"}
    monkeypatch.setattr(
        "stackcheck.recipe.indexes.newest", lambda names: {name: newest.get(name) for name in names}
    )
    cli_matrix.outdated(selectors=["cpu*", "cuda12.8*"], as_json=True, root=ROOT)
    told = json.loads(capsys.readouterr().out)
    (triton,) = (issue for issue in told["known_issues"] if issue["id"] == "K-triton-hopper-dqkwg")
    assert triton["stacks"] == ["cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04"]
    found = {pin["name"]: pin for pin in told["outdated"]}
    assert found["flash-attn"] == {
        "name": "flash-attn",
        "pinned": "2.8.3",
        "newest": "2.9.0",
        "stacks": ["cuda12.8-torch2.8.0-fa2.8.3-py3.12-ubuntu24.04"],
    }
    assert found["torch"]["pinned"] == "2.8.0+cu128"
    assert "numpy" not in found
    assert found["psutil"]["newest"] is None


def test_compat_check_names_planted_contradictions_in_pairs_and_exits_2(checkout: Path):
    path = checkout / "images" / "compat.yaml"
    path.write_text(
        path.read_text()
        + """
  - id: R5-planted
    when: {arch: gfx950}
    require: {rocm: "<7.0"}
    because: planted
    source: CM
  - id: R1-planted
    when: {wheels: upstream, vendor: amd, torch: 2.13.0}
    require: {rocm: "6.4"}
    because: planted
    source: TI
"""
    )
    done = _run("compat", "check", root=checkout)
    assert done.returncode == 2
    assert "R5-gfx950-rocm and R5-planted require different values of rocm" in done.stderr
    assert "R1-planted and R1-upstream-rocm[2.13.0] require" in done.stderr
    told = json.loads(_run("compat", "check", "--json", root=checkout).stdout)
    assert ["R5-gfx950-rocm", "R5-planted", "rocm"] in told["contradictions"]


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
