"""What a user types wrong, or what was touched, ends with its exit code and a message, never a traceback."""

from __future__ import annotations

import datetime as dt
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from small_checkout import ROOT, Done, call
from small_images import STACK_ID, make_image, new_key, release
from stackcheck.certificate import keys

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

NOW = dt.datetime.now(dt.UTC)
KEY = new_key()
Capsys = pytest.CaptureFixture[str]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy(ROOT / "matrix.yaml", tmp_path)
    return tmp_path


def edited(checkout: Path, old: str, new: str) -> Path:
    path = checkout / "matrix.yaml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    return checkout


def test_each_problem_of_a_matrix_is_one_line(checkout: Path, capsys: Capsys) -> None:
    edited(checkout, "torch: 2.13.0", "torhc: 2.13.0\n    colour: red")
    edited(checkout, "publish: oci:dist", "publish: [oci:dist]")
    done = call(capsys, "list", "--root", checkout)
    assert done.code == 2
    places = ("publish: ", "stacks[0].torhc: ", "stacks[0].colour: ")
    for place in places:
        assert [line for line in done.err.splitlines() if f"matrix.yaml: {place}" in line], place


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    image = make_image(tmp_path / "oci")
    release(image, tmp_path / "dist", KEY, now=NOW - dt.timedelta(days=2))
    return tmp_path / "dist"


def verify(
    capsys: Capsys, dist: Path, *options: str, model: str = "CPU", key: EllipticCurvePrivateKey = KEY
) -> Done:
    path = dist.with_name("publisher.pub")
    path.write_bytes(keys.public_pem(key.public_key()))
    host = ("--device-model", model, "--driver", "none")
    return call(capsys, "verify", f"oci:{dist}:{STACK_ID}", "--key", path, *host, *options)


@pytest.mark.parametrize(("age", "code"), [("47h", 7), ("1d", 7), ("3d", 0), ("49h", 0)])
def test_a_certificate_over_its_age_is_exit_7(dist: Path, capsys: Capsys, age: str, code: int) -> None:
    done = verify(capsys, dist, "--max-age", age)
    assert done.code == code
    assert ("too old" in done.err) == bool(code)


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


@pytest.mark.parametrize("reference", ["", "oci:", "dist", "oci:dist", "host/repo", "oci:dist@sha256:12"])
def test_a_reference_that_is_none_is_exit_2(capsys: Capsys, tmp_path: Path, reference: str) -> None:
    path = tmp_path / "publisher.pub"
    path.write_bytes(keys.public_pem(KEY.public_key()))
    host = ("--device-model", "CPU", "--driver", "none", "--key", path)
    assert call(capsys, "verify", reference, *host).code == 2


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
