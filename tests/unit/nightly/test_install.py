"""`stackcheck nightly install` by the command line; what the files say is judged in tests/integration."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml

from small_checkout import call
from stackcheck.certificate import keys
from stackcheck.nightly import install

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.usefixtures("own_home")

IMAGE = f"debian@sha256:{'0' * 64}"
KINDS = {
    "--systemd": {
        "stackcheck-nightly.service",
        "stackcheck-nightly.timer",
        "stackcheck-nightly.path",
        "stackcheck-nightly-failed.service",
    },
    "--cron": {"stackcheck-nightly"},
    "--github": {"stackcheck-nightly.yml"},
    "--kubernetes": {"stackcheck-nightly.yaml"},
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_writes_its_files_and_a_dry_run_writes_none(kind, tmp_path, capsys):
    into = tmp_path / "into"
    arguments = ("nightly", "install", kind, "--label", "a", "--node", "b", "--image", IMAGE, "--into", into)
    done = call(capsys, *arguments, "--dry-run")
    assert (done.code, into.exists()) == (0, False)
    assert all(f"would write {into / name}" in done.out for name in KINDS[kind])
    done = call(capsys, *arguments, "--json")
    assert {path.name for path in into.iterdir()} == KINDS[kind]
    told = json.loads(done.out)
    assert told["written"] is True
    assert {Path(name).name: text for name, text in told["files"].items()} == {
        path.name: path.read_text() for path in into.iterdir()
    }


def test_every_node_has_a_job_of_its_own_and_a_minute_that_stays():
    assert install.minute("gpu-1") == install.minute("gpu-1")
    assert len({install.minute(f"gpu-{number}") for number in range(200)}) > 40
    assert len({install._label(name) for name in ("gpu-1", "GPU-1", "gpu.1", "gpu_1")}) == 4


@pytest.mark.parametrize(
    "name", ["010", "true", "no", "null", "1e3", "0x1F", "1_000", "2026-01-01", "1.5", "on", "n", "gpu-1"]
)
def test_a_name_that_yaml_could_read_as_something_else_stays_a_text(name):
    wanted = install.TimerSettings(root=Path("/x"), program="p", user="u", nodes=(name,), image=IMAGE)
    (text,) = install.installation("kubernetes", wanted).files.values()
    (job,) = yaml.safe_load_all(text)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/hostname": name}
    assert pod["containers"][0]["image"] == IMAGE
    (text,) = install.installation("github", dataclasses.replace(wanted, labels=(name,))).files.values()
    assert yaml.safe_load(text)["jobs"]["nightly"]["strategy"]["matrix"]["runner"] == [name]


def test_a_night_finds_the_key_and_the_folders_of_the_shell_that_installed_it(tmp_path, capsys, monkeypatch):
    for name in install.CARRIED:
        monkeypatch.setenv(name, f"/of/{name}")
    monkeypatch.setenv("STACKCHECK_KEY_PASSPHRASE", "a secret")
    for kind in ("--systemd", "--cron", "--kubernetes"):
        call(capsys, "nightly", "install", kind, "--node", "n", "--image", IMAGE, "--into", tmp_path)
    units = [*tmp_path.glob("*.service"), tmp_path / "stackcheck-nightly", *tmp_path.glob("*.yaml")]
    assert len(units) == 4
    for unit in units:
        text = unit.read_text()
        assert "a secret" not in text
        assert [name for name in install.CARRIED if f"{name}=/of/{name}" not in text] == [], unit.name
        if "failed" not in unit.name:
            assert f"--key {keys.default_path()}" in text


def test_every_variable_of_a_folder_that_the_tool_reads_is_carried():
    """A new $XDG_… or $STACKCHECK_…FILE that only the shell has would be lost in the timer."""
    sources = (path.read_text() for path in (ROOT / "stackcheck").rglob("*.py"))
    read = {name for text in sources for name in re.findall(r"\bXDG_[A-Z]+_HOME\b", text)}
    assert read
    assert read <= set(install.CARRIED)


def test_actions_of_the_workflow_are_by_digest_and_those_of_this_repository():
    wanted = install.TimerSettings(root=Path("/x"), program="p", user="u", labels=("a",))
    (text,) = install.installation("github", wanted).files.values()
    used = re.findall(r"uses: (.*)", text)
    ours = "".join(path.read_text() for path in (ROOT / ".github/workflows").glob("*.yml"))
    assert used
    assert all(re.search(r"@[0-9a-f]{40} # v", each) and each in ours for each in used)
