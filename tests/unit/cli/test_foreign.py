"""Images by their reference: what holds them, and under which name they are published."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from small_checkout import AMD_STACK, CHECKS, CPU_STACK, FOREIGN, FakeEngine, call, verify
from stackcheck.oci import tags
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


def test_an_image_from_elsewhere_is_tested_certified_and_published_under_its_own_name(
    fake_engine: FakeEngine,  # noqa: ARG001
    small_checkout: Path,
    capsys: Capsys,
) -> None:
    done = call(capsys, "test", FOREIGN, "--json")
    assert done.code == 0
    assert sorted(json.loads(done.out)["required"]) == sorted(CHECKS)
    assert call(capsys, "certify", FOREIGN).code == 0
    assert call(capsys, "publish", FOREIGN).code == 0
    label = tags.label(FOREIGN)
    assert label in OciLayout(small_checkout / "dist").tags()
    done = verify(capsys, f"oci:dist:{label}", "--json")
    assert json.loads(done.out)["stack"] is None


def test_an_image_that_names_a_stack_is_held_to_the_checks_of_that_stack(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": CPU_STACK}
    done = call(capsys, "test", FOREIGN, "--json")
    assert sorted(json.loads(done.out)["required"]) == sorted(CHECKS)
    assert done.code == 0
    call(capsys, "certify", FOREIGN)
    assert call(capsys, "publish", FOREIGN).code == 0


def test_an_image_that_names_a_stack_is_held_to_the_machines_of_that_stack(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": AMD_STACK}
    done = call(capsys, "certify", FOREIGN, "--gpu-vendor", "cpu")
    assert done.code in {6, 9}
    assert "tested_on" in done.err


def test_an_image_of_a_stack_that_the_matrix_lacks_is_refused(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.labels = {"stackcheck.stack": "cpu-*"}
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's stack is not in matrix.yaml" in done.err
    assert fake_engine.runs == []


def test_an_image_whose_history_names_no_layers_is_a_clear_error(
    fake_engine: FakeEngine, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_engine, "step_sizes", lambda _reference: ())
    done = call(capsys, "test", FOREIGN)
    assert done.code == 2
    assert "the image's history does not match" in done.err


COMPILED = b"\x7fELF a Python of no package"
DIGEST = hashlib.sha256(COMPILED).hexdigest()
ACCEPTED = ("--accept-python", DIGEST)


def test_a_python_of_no_package_is_certified_as_accepted_and_readers_can_refuse_it(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    fake_engine.image = {"/usr/local/bin/python3": COMPILED}
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert f"--accept-python sha256:{DIGEST}" in done.err
    label = tags.label(FOREIGN)
    assert not (small_checkout / "build" / label / "oci").exists()  # said before the layout is written

    assert call(capsys, "certify", FOREIGN, *ACCEPTED).code == 0
    assert len(fake_engine.runs) == 1
    assert call(capsys, "certify", FOREIGN).code == 6  # the accepted run is not used again without it
    assert call(capsys, "certify", FOREIGN, *ACCEPTED).code == 0
    assert len(fake_engine.runs) == 1
    assert call(capsys, "publish", FOREIGN).code == 0
    done = verify(capsys, f"oci:dist:{label}")
    assert done.code == 0
    assert f"whoever certified it accepted /usr/local/bin/python3 (sha256:{DIGEST})" in done.err
    done = verify(capsys, f"oci:dist:{label}", "--packaged-python")
    assert done.code == 7
    assert "belongs to no package" in done.err

    runs = len(fake_engine.runs)
    done = call(capsys, "nightly", "--force")  # what the certificate accepts, a later night accepts too
    assert done.code == 0, done.err
    assert len(fake_engine.runs) > runs
    assert verify(capsys, f"oci:dist:{label}").code == 0
    fake_engine.image = {"/usr/local/bin/python3": COMPILED + b"!"}
    assert "belongs to no package" in call(capsys, "nightly", "--force").err


def test_a_python_of_a_package_is_a_level_that_readers_can_ask_for(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    for verb in ("certify", "publish"):
        assert call(capsys, verb, FOREIGN).code == 0
    label = tags.label(FOREIGN)
    assert verify(capsys, f"oci:dist:{label}", "--packaged-python").code == 0
    signed = (small_checkout / "build" / label / "statements").glob("*.dsse.json")
    payloads = [json.loads(base64.b64decode(json.loads(path.read_text())["payload"])) for path in signed]
    levels = [item["predicate"].get("verifiedLevels", ()) for item in payloads]
    assert any("STACKCHECK_PYTHON_PACKAGED" in each for each in levels)
    assert "STACKCHECK_PYTHON_PACKAGED" in call(capsys, "policy", "cosign", "--packaged-python").out
    assert fake_engine.runs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("certify", CPU_STACK, *ACCEPTED), "is for images that were not built here"),
        (("test", FOREIGN, "--accept-python", "abc"), "takes the SHA-256 of a file"),
        (("certify", "python3.12-torch"), "add its tag: python3.12-torch:latest"),
    ],
)
def test_a_wrong_argument_about_an_image_names_the_right_one(
    fake_engine: FakeEngine, capsys: Capsys, arguments: tuple[str, ...], says: str
) -> None:
    done = call(capsys, *arguments)
    assert done.code in {2, 3}
    assert says in done.err
    assert fake_engine.runs == []


def test_an_image_for_another_processor_is_refused_before_anything_is_written(
    fake_engine: FakeEngine, small_checkout: Path, capsys: Capsys
) -> None:
    fake_engine.processor = "arm64"
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 4
    assert "the image is for a different processor" in done.err
    assert "docker pull --platform linux/amd64" in done.err
    assert not (small_checkout / "build" / tags.label(FOREIGN)).exists()


def test_an_image_without_torch_is_refused_in_one_sentence(fake_engine: FakeEngine, capsys: Capsys) -> None:
    fake_engine.inventory[0]["head"] = "Name: numpy\nVersion: 2.4.6"
    done = call(capsys, "certify", FOREIGN)
    assert done.code == 6
    assert "the image has no torch" in done.err
    assert fake_engine.runs == []


def test_the_digest_of_a_tag_is_said(fake_engine: FakeEngine, capsys: Capsys) -> None:
    done = call(capsys, "certify", FOREIGN, "--json")
    digest = json.loads(done.out)["digest"]
    assert f"{FOREIGN}: it is {digest}; what follows is about this digest, not the tag" in done.err
    assert fake_engine.runs
