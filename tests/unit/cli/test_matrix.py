from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from small_checkout import Done, call
from stackcheck.cli import matrix as cli_matrix

ROOT = Path(__file__).parents[3]
Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a verb in this process, on the checkout `root`."""
    return lambda *arguments, root=ROOT: call(capsys, *arguments, "--root", root)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy(ROOT / "matrix.yaml", tmp_path)
    return tmp_path


def test_explain_json_is_the_contract_and_exits_11_for_a_refusal(run: Run):
    done = run("explain", "rocm=7.2", "torch=2.6.0", "--json")
    answer = json.loads(done.out)
    assert done.code == 11
    assert answer["allowed"] is False
    assert {"id", "holds", "because", "source"} <= answer["rules"][0].keys()
    assert answer["nearest"]


def test_outdated_names_each_pin_that_an_index_has_a_newer_version_of_and_its_stacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    newest = {"numpy": "2.4.6", "torch": "2.13.0", "flash-attn": "2.9.0"}
    monkeypatch.setattr(
        "stackcheck.recipe.indexes.versions",
        lambda name, **_options: (newest[name],) if name in newest else (),
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


def test_compat_check_names_planted_contradictions_in_pairs_and_exits_2(run: Run, checkout: Path):
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
    done = run("compat", "check", root=checkout)
    assert done.code == 2
    assert "R5-gfx950-rocm and R5-planted require different values of rocm" in done.err
    assert "R1-planted and R1-upstream-rocm[2.13.0] require" in done.err
    told = json.loads(run("compat", "check", "--json", root=checkout).out)
    assert ["R5-gfx950-rocm", "R5-planted", "rocm"] in told["contradictions"]
