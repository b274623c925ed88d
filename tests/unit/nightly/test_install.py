"""`stackcheck nightly install` by the command line; what the files say is judged in tests/integration."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import yaml

from small_checkout import call
from stackcheck.nightly import install

pytestmark = pytest.mark.usefixtures("own_home")

Capsys = pytest.CaptureFixture[str]
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
def test_each_kind_writes_its_files_and_a_dry_run_writes_none(
    kind: str, tmp_path: Path, capsys: Capsys
) -> None:
    into = tmp_path / "into"
    arguments = ("nightly", "install", kind, "--label", "a", "--node", "b", "--into", into)
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


def test_options_are_passed_on_to_the_nights_and_no_key_is_named_on_github(
    tmp_path: Path, capsys: Capsys
) -> None:
    options = ("--from", "registry.example.org/team/stacks", "--gpu-vendor", "amd", "--key", "my.key")
    for kind, named in (("--cron", True), ("--github", False)):
        done = call(
            capsys, "nightly", "install", kind, "--label", "a", *options, "--into", tmp_path, "--dry-run"
        )
        assert "--from registry.example.org/team/stacks" in done.out
        assert "--gpu-vendor amd" in done.out
        assert ("/my.key" in done.out) == named


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (("--systemd", "--root", "a folder"), "--root"),
        (("--systemd", "--user", "me; id"), "--user"),
        (("--systemd", "--root", "50%"), "--root"),  # systemd takes % for a specifier, cron for a line break
        (("--github", "--label", "a]"), "--label"),
        (("--kubernetes", "--node", "-x"), "--node"),
    ],
)
def test_what_the_files_cannot_hold_is_refused(
    arguments: tuple[str, ...], where: str, capsys: Capsys
) -> None:
    done = call(capsys, "nightly", "install", *arguments, "--dry-run")
    assert done.code == 2
    assert f"where: {where}" in done.err


def test_every_node_has_a_job_of_its_own_and_a_minute_that_stays() -> None:
    assert install.minute("gpu-1") == install.minute("gpu-1")
    assert len({install.minute(f"gpu-{number}") for number in range(200)}) > 40
    assert len({install._label(name) for name in ("gpu-1", "GPU-1", "gpu.1", "gpu_1")}) == 4


@pytest.mark.parametrize(
    "name", ["010", "true", "no", "null", "1e3", "0x1F", "1_000", "2026-01-01", "1.5", "on", "n", "gpu-1"]
)
def test_a_name_that_yaml_could_read_as_something_else_stays_a_text(name: str) -> None:
    wanted = install.TimerSettings(root=Path("/x"), program="p", user="u", nodes=(name,), image=name)
    (text,) = install.installation("kubernetes", wanted).files.values()
    (job,) = yaml.safe_load_all(text)
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"kubernetes.io/hostname": name}
    assert pod["containers"][0]["image"] == name
    (text,) = install.installation("github", dataclasses.replace(wanted, labels=(name,))).files.values()
    assert yaml.safe_load(text)["jobs"]["nightly"]["strategy"]["matrix"]["runner"] == [name]
