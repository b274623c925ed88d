"""What `images --dry-run`, `list` and `doctor` say of machines that are not here, of this checkout's matrix.

`STACKCHECK_WRITE_GOLDEN=1 pytest tests/unit/cli/test_outlooks.py` writes the files in outlooks/ anew.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from small_checkout import AMD_STACK, FakeEngine, call
from stackcheck.cli import build
from stackcheck.cli import matrix as cli_matrix

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "outlooks"
MACHINES = {
    "mi300x-x8": ("--machine", "MI300X:8", "--driver", "30.30.3"),
    "h100-x8": ("--machine", "H100:8", "--driver", "580.95.05"),
    "h200-x2": ("--machine", "H200:2", "--driver", "580.95.05"),
    "h200-x2-old-driver": ("--machine", "H200:2", "--driver", "550.54.15"),
}
CPU_TIME_S = 6.0  # about 1.5 s where nothing else runs; the processor of a test may be slower


@pytest.mark.parametrize("name", MACHINES)
def test_images_says_the_truth_about_a_machine_before_a_build(name, capsys):
    done = call(capsys, "images", "--dry-run", *MACHINES[name], "--root", ROOT)
    file = GOLDEN / f"{name}.txt"
    text = f"{done.out}--- exit {done.code}\n"
    if os.environ.get("STACKCHECK_WRITE_GOLDEN"):
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["mi300x-x8", "h100-x8"])
def test_it_is_said_in_seconds(name):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [
        sys.executable,
        "-m",
        "stackcheck",
        "images",
        "--dry-run",
        *MACHINES[name],
        "--root",
        str(ROOT),
    ]
    subprocess.run(command, capture_output=True, check=False, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < CPU_TIME_S


def test_the_three_verbs_agree(capsys):
    machine = MACHINES["h200-x2"]
    listed = json.loads(call(capsys, "list", *machine, "--json", "--root", ROOT).out)["stacks"]
    outlooks = {one["id"]: one["outlook"] for one in listed if one["vendor"] == "nvidia"}
    examined = json.loads(call(capsys, "doctor", *machine, "--json", "--root", ROOT).out)
    assert {one["name"].removeprefix("certify "): one["ok"] for one in examined} == {
        name: one["can_be_certified"] for name, one in outlooks.items()
    }
    planned = json.loads(call(capsys, "images", "--dry-run", *machine, "--json", "--root", ROOT).out)
    assert {one["id"]: one["reasons"] for one in planned if one["state"] == "refuse"} == {
        name: one["reasons"] for name, one in outlooks.items() if not one["can_be_certified"]
    }


def test_a_machine_that_is_not_here_is_no_place_to_build(capsys):
    done = call(capsys, "images", "--machine", "H100:8", "--root", ROOT)
    assert done.code == 2
    assert "images builds on this one" in done.err
    assert "next: " in done.err


@pytest.mark.usefixtures("own_home", "no_disk_flushes")
def test_what_cannot_be_certified_is_built_only_anyway(small_checkout, monkeypatch, capsys):
    engine = FakeEngine()
    asked: list[None] = []
    monkeypatch.setattr(build, "connected", lambda *_a, **_k: asked.append(None) or engine)
    done = call(capsys, "images", AMD_STACK, "--root", small_checkout)
    assert (done.code, engine.builds, asked) == (9, [], [])  # no engine is installed for nothing
    call(capsys, "images", AMD_STACK, "--anyway", "--root", small_checkout)
    assert engine.builds


# The verbs that only read the matrix and its rules.


def test_explain_json_is_the_contract_and_exits_11_for_a_refusal(capsys):
    done = call(capsys, "explain", "rocm=7.2", "torch=2.6.0", "--json", "--root", ROOT)
    answer = json.loads(done.out)
    assert done.code == 11
    assert answer["allowed"] is False
    assert {"id", "holds", "because", "source"} <= answer["rules"][0].keys()
    assert answer["nearest"]


def test_outdated_names_each_pin_that_an_index_has_a_newer_version_of_and_its_stacks(monkeypatch, capsys):
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
