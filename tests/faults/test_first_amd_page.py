"""docs/guides/first-amd-host.md, line by line, on a made-up host of eight MI300X: its table holds.

Steps 4 to 6 (explain, lock, build) are test_rocm_mirror.py's; 9 and 10 test_first_amd_host.py's; 11 needs a
device, as a made-up result is never certified. Step 12 verifies a certificate of a few kilobytes.
"""

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import host_verdicts
import made_up
import result_files
import small_dist
import small_images
from fakeamd import host, kfd, sysfs, tree
from fakeamd.states import STATES
from stackcheck.certificate import keys
from stackcheck.cli import app
from stackcheck.engine import doctor
from stackcheck.errors import EngineError
from stackcheck.suite.verdict import MADE_UP
from stackcheck.vendors import amd, nvidia, seen
from test_amd_hosts import IMAGES, NEW, run

pytestmark = pytest.mark.slow
PAGE = (made_up.ROOT / "docs/guides/first-amd-host.md").read_text(encoding="utf-8")
STEPS = {
    match[1]: tuple(cell.strip() for cell in match[2].split(" | "))
    for match in re.finditer(r"^\| (\d+)\. [\w ,]+ \| (.+) \|$", PAGE, re.MULTILINE)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where step 3 leaves its files."""
    return tmp_path_factory.mktemp("step-3")


@pytest.fixture(scope="module")
def devices(folder: Path) -> Mapping[str, Any]:
    """The result of step 3."""
    return run("mi300x", NEW, folder)


def test_every_step_of_the_page_is_known_here():
    assert list(STEPS) == [str(number) for number in range(1, 13)]


@pytest.fixture
def eight(tmp_path, monkeypatch) -> None:
    """This host with the kernel's files and device nodes of eight MI300X."""
    state = STATES["mi300x"]
    tree.write(tmp_path / "sys", sysfs.tree(state, NEW.metrics_revision))
    for name in ("kfd", *(f"dri/renderD{128 + minor}" for minor in kfd.minors(state))):
        node = tmp_path / "dev" / name
        node.parent.mkdir(parents=True, exist_ok=True)
        node.touch()
    for module in (amd, seen):
        monkeypatch.setattr(module, "SYS", tmp_path / "sys")
    monkeypatch.setattr(amd, "DEV", tmp_path / "dev")
    monkeypatch.setattr(nvidia, "present", lambda: False)
    monkeypatch.delenv("DOCKER_HOST", raising=False)


@pytest.mark.usefixtures("eight")
def test_steps_1_and_2_show_the_machine_and_what_is_needed():
    command, _, _ = STEPS["2"]
    assert "`sudo .venv/bin/stackcheck doctor --fix`" in command
    # --room 0: so that a full disk does not make it remove this host's build cache
    for arguments in (["--fix"], [], ["--json"]):
        done = CliRunner().invoke(
            app, ["doctor", "--room", "0", "--root", str(made_up.ROOT), *arguments], env={"COLUMNS": "250"}
        )
        assert done.exit_code == 0, done.output
        assert not re.search(r" missing ", done.stdout)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    found, driver = rows["amd GPUs"]["found"].split(", driver ")
    assert (found, driver) == ("8 x MI300X", amd.driver())
    assert f"`amd GPUs  ok  {found}, driver " in STEPS["1"][1]
    asked = {"engine", "buildx", "disk", "memory"}
    assert all(rows[name]["ok"] and rows[name]["needed"] and name in STEPS["1"][1] for name in asked)
    assert "no line says `missing`" in STEPS["2"][1]


@pytest.mark.usefixtures("eight")
def test_step_1_names_the_command_that_mends_a_host(monkeypatch):
    monkeypatch.setattr(doctor.host_setup, "has_buildx", lambda: False)
    done = CliRunner().invoke(app, ["doctor", "--room", "0", "--json", "--root", str(made_up.ROOT)])
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    assert isinstance(done.exception, EngineError)
    assert (rows["buildx"]["ok"], rows["buildx"]["fix"]) == (False, "stackcheck doctor --fix")
    assert done.exception.next_step in STEPS["2"][0].replace(".venv/bin/", "")


@pytest.mark.usefixtures("eight")
@pytest.mark.parametrize(("count", "driver", "valid"), [(8, None, True), (4, None, False), (8, "1.0", False)])
def test_step_12_shows_the_machine_and_its_measured_bounds(count, driver, valid, tmp_path):
    """By a certificate of eight MI300X, on the host of the fixture; of another machine it does not hold."""
    machine = result_files.host("amd", *["MI300X"] * count, driver=driver or amd.driver())
    image = small_images.make_image(tmp_path / "image")
    small_dist.release(image, tmp_path / "dist", host=machine, bound_class="measured")
    key = tmp_path / "publisher.pub"
    key.write_bytes(keys.public_pem(small_dist.KEY.public_key()))
    command = f"verify oci:{tmp_path}/dist:{small_images.STACK_ID} --key {key} --max-age 36500d"
    done = CliRunner().invoke(app, command.split())
    assert (done.exit_code == 0) is valid, done.output
    if valid:
        shown = dict(re.findall(r"^(\w+):? +(.+)$", done.stdout, re.MULTILINE))
        assert (shown["device_model"], shown["driver"], shown["devices"]) == ("MI300X", amd.driver(), "8")
        assert re.fullmatch(r"\d+ measured", shown["bounds"])


def test_step_3_ends_without_a_failure_and_says_why_it_skips(devices):
    command, expected, _ = STEPS["3"]
    assert "pytest tests/ --gpu-vendor amd -k devices" in command
    assert "no failure" in expected
    checks = devices["checks"].values()
    assert {check["outcome"] for check in checks} == {"passed", "skipped"}
    assert all(check["reason"] for check in checks if check["outcome"] == "skipped")


@pytest.mark.parametrize("state", ["mi300x", "mi210", "mi355x-guest"])
def test_what_the_page_asks_to_send_names_no_gpu_and_no_node(state, tmp_path):
    """The made-up host has neither grep nor sed: they run here, over its files and what its amd-smi says."""
    tree.write(tmp_path / "sys", sysfs.tree(STATES[state], NEW.metrics_revision))
    smi = tmp_path / "amd-smi"
    (properties,) = re.findall(r"`(grep [^`]+)`", STEPS["1"][2])
    sent = re.findall(r"`((?:bash|amd-smi) [^`]+)`", STEPS["3"][2])
    told = shell(properties.replace("/sys/", f"{tmp_path}/sys/"), tmp_path)
    for command in sent:
        (arguments,) = re.findall(r"amd-smi ([\w -]+)", command)
        said = host.run(STATES[state], NEW, ["amd-smi", *arguments.split()]).stdout
        smi.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
        smi.chmod(0o755)
        told += shell(command, tmp_path)
    assert len(sent) == 2
    assert {"simd_count", "vram", "link_type"} <= set(re.findall(r"\w+", told.lower()))
    one = format(kfd.UNIQUE_ID, "x")[:-2]  # of all GPUs
    own = {str(kfd.UNIQUE_ID)[:-3], one, one[-8:], str(kfd.HIVE), format(kfd.HIVE, "x"), "serial"}
    assert not [identity for identity in own if identity in told.lower()]


def shell(command: str, folder: Path) -> str:
    """What a command of the page prints, with the programs of a folder first."""
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.check_output(["bash", "-c", command], text=True, env={"PATH": path})


@pytest.mark.usefixtures("devices")
def test_the_result_of_step_3_has_hashes_of_the_devices_ids(folder):
    told = (folder / "result.json").read_text() + (folder / "junit.xml").read_text()
    assert format(kfd.UNIQUE_ID, "x")[:-2] not in told.lower()
    assert str(kfd.UNIQUE_ID)[:-3] not in told


def test_step_7_passes_on_a_healthy_machine(devices, folder):
    found = host_verdicts.judged(devices, folder, IMAGES[NEW.release][1])
    assert f"`{found.status}`" in STEPS["7"][1]
    assert found.status == "PASSED"


def test_step_8_prints_the_drivers_line_and_the_class_of_the_bounds(devices, folder):
    host_verdicts.judged(devices, folder)
    done = CliRunner().invoke(app, ["judge", str(folder / "whole.json"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["reasons"]) == (6, [MADE_UP])  # and nothing else
    assert told["driver"]["state"] in {"listed", "unlisted"}
    assert set(told["bounds"]) == {"derived", "published"}
    assert all(word in STEPS["8"][1] for word in ("`listed`", "not listed", *told["bounds"]))
