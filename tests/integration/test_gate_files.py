"""What `stackcheck gate --install` writes, by the validators of those who read it, and by a shell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from stackcheck.nightly import gate_files
from stackcheck.nightly.gate_files import Kind

ROOT = Path(__file__).resolve().parents[2]
IMAGE = "registry.example.org/team/stacks@sha256:" + "a" * 64
pytestmark = pytest.mark.integration


def write(kind: Kind, folder: Path, image: str | None = None) -> list[Path]:
    program = str(Path(sys.executable).parent / "stackcheck")
    wanted = gate_files.GateSettings(root=ROOT, image=image, vendor="nvidia", program=program)
    made = gate_files.installation(kind, wanted, folder)
    for path, text in made.files.items():
        path.write_text(text)
        path.chmod(0o644)
    return list(made.files)


def test_systemd_accepts_the_units(tmp_path, systemd_analyze):
    command = [str(systemd_analyze), "verify", *map(str, write("systemd", tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "stackcheck-gate" not in done.stderr, done.stderr
    assert done.returncode == 0


def test_kubernetes_accepts_the_pod(tmp_path, validators):
    (path,) = write("kubernetes", tmp_path, IMAGE)
    command = [validators / "kubernetes-validate", "--strict", "--kubernetes-version", "1.33", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pod = yaml.safe_load(path.read_text())["spec"]
    (gate,) = pod["initContainers"]
    assert gate["image"] == pod["containers"][0]["image"] == IMAGE
    assert gate["resources"] == pod["containers"][0]["resources"]
    assert "--tier=gate" in gate["command"]
    path.write_text(path.read_text().replace("initContainers:", "initContainer:"))
    assert subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.parametrize("kind", ["slurm", "health", "npd"])
def test_the_shell_of_each_script_is_a_shell_that_runs(tmp_path, kind):
    for path in write(kind, tmp_path):
        if path.suffix == ".sh":
            subprocess.run(["sh", "-n", path], check=True)


def test_node_problem_detector_gets_a_monitor_of_its_custom_kind(tmp_path):
    """The fields of CustomPluginConfig and CustomRule in its source; a rule names one of the conditions."""
    monitor = json.loads(next(p for p in write("npd", tmp_path) if p.suffix == ".json").read_text())
    assert set(monitor) == {"plugin", "pluginConfig", "source", "metricsReporting", "conditions", "rules"}
    assert monitor["plugin"] == "custom"
    (condition,), (rule,) = monitor["conditions"], monitor["rules"]
    assert set(condition) == {"type", "reason", "message"}
    assert (rule["type"], rule["condition"]) == ("permanent", condition["type"])
    assert rule["reason"] != condition["reason"]


@pytest.mark.parametrize("drain", [None, "slurm"])
@pytest.mark.parametrize(
    ("said", "code", "broken"),
    [
        ('{"state": "fit", "exit_code": 0, "drains": false}', 0, False),
        ('{"state": "unfit", "exit_code": 9, "drains": true}', 9, True),
        ('{"state": "unfit", "exit_code": 9, "drains": false}', 9, False),  # in use by another job
        ('{"state": "failed", "exit_code": 6, "drains": false}', 6, False),  # of the image
        ("", 1, False),
        ("Traceback: drains", 137, False),
    ],
)
def test_the_prolog_fails_only_where_a_part_of_the_node_is_broken_and_it_may_drain(
    said, code, *, broken, drain, tmp_path
):
    """Slurm drains a node whose prolog fails: an image's fault would drain one node after another."""
    program, log = tmp_path / "stackcheck", tmp_path / "log"
    program.write_text(f"#!/bin/sh\necho '{said}'\necho progress >&2\nexit {code}\n")
    program.chmod(0o755)
    wanted = gate_files.GateSettings(root=ROOT, program=str(program), drain=drain, log=str(log))
    (text,) = gate_files.installation("slurm", wanted).files.values()
    assert ("--drain" in text.partition("PATH=")[2]) is bool(drain)
    assert subprocess.run(["sh", "-c", text], check=False).returncode == int(broken and drain == "slurm")
    assert sorted(log.read_text().split("\n")) == sorted([*said.split("\n"), "progress", ""])
