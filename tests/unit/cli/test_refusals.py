"""What a user types wrong, or what was touched, ends with its exit code and a message, never a traceback."""

import datetime as dt
from pathlib import Path

import pytest

from small_checkout import ROOT, call
from small_images import STACK_ID, make_image, new_key, release
from stackcheck.certificate import keys

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

NOW = dt.datetime.now(dt.UTC)
KEY = new_key()
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    image = make_image(tmp_path / "oci")
    release(image, tmp_path / "dist", KEY, now=NOW - dt.timedelta(days=2))
    return tmp_path / "dist"


@pytest.mark.parametrize("verb", ["pull", "run"])
def test_what_does_not_verify_is_neither_pulled_nor_run(
    dist: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(
        "stackcheck.engine.client.Engine.connect", lambda: pytest.fail("the engine was asked")
    )
    path = dist.with_name("other.pub")
    path.write_bytes(keys.public_pem(new_key().public_key()))
    host = ("--device-model", "CPU", "--driver", "none", "--key", path)
    command = ("--", "true") if verb == "run" else ()
    refused = 125 if verb == "run" else 7  # the codes of a program that runs are its own
    assert call(capsys, verb, f"oci:{dist}:{STACK_ID}", *host, *command).code == refused


def test_a_stack_is_not_made_from_a_certified_image(capsys: Capsys) -> None:
    done = call(capsys, "certify", STACK_ID, "--derived-from", "oci:dist:x", "--root", str(ROOT))
    assert done.code == 2
    assert "--derived-from is for images that were not built here" in done.err


def test_an_image_below_that_is_not_certified_ends_it_before_anything_runs(
    capsys: Capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    call(capsys, "key")
    done = call(
        capsys, *("certify", "team/mine:1", "--derived-from", f"oci:{tmp_path}:x", "--root", str(ROOT))
    )
    assert done.code == 7
    assert str(tmp_path) in done.err
