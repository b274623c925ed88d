"""The verbs that take an image out of here, and that say what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_checkout import CPU_STACK, FakeEngine, call

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]
REFERENCE = f"oci:dist:{CPU_STACK}"


def test_the_list_of_packages_is_printed_from_what_was_published(
    fake_engine: FakeEngine, capsys: Capsys
) -> None:
    fake_engine.inventory[:0] = [
        {"kind": "python", "place": "/x/a.dist-info", "head": "Name: a\nVersion: 1\nLicense-Expression: MIT"}
    ]
    assert call(capsys, "images").code == 0
    done = call(capsys, "sbom", REFERENCE)
    assert done.code == 0
    assert [line.split() for line in done.out.splitlines()] == [
        ["package", "version", "kind", "licence"],
        ["python3-minimal", "3.11.2-1", "deb", "not", "stated"],
        ["a", "1", "pypi", "MIT"],
        ["numpy", "2.4.6", "pypi", "not", "stated"],
        ["torch", "2.13.0+cpu", "pypi", "not", "stated"],
    ]


@pytest.mark.usefixtures("fake_engine")
def test_the_json_is_the_document_that_was_signed(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "images")
    done = call(capsys, "sbom", REFERENCE, "--json")
    assert done.code == 0
    kept = json.loads((small_checkout / "build" / CPU_STACK / "sbom.json").read_text())
    assert json.loads(done.out) == kept
    assert kept["bomFormat"] == "CycloneDX"


@pytest.mark.usefixtures("fake_engine")
def test_a_changed_byte_is_refused(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "images")
    for path in (small_checkout / "dist" / "blobs" / "sha256").iterdir():
        body = path.read_bytes()
        if b"dsseEnvelope" in body:
            path.write_bytes(body[:-1] + b" ")
    assert call(capsys, "sbom", REFERENCE).code == 7


@pytest.mark.usefixtures("fake_engine")
def test_an_export_can_be_asked_what_it_would_do_and_answers_machines(
    small_checkout: Path, capsys: Capsys
) -> None:
    call(capsys, "build", CPU_STACK)
    done = call(capsys, "export", CPU_STACK, "--dry-run")
    assert done.code == 0
    assert f"write {CPU_STACK}.tar, 0.0 MB" in done.out
    assert not (small_checkout / f"{CPU_STACK}.tar").exists()
    done = call(capsys, "export", CPU_STACK, "--json")
    assert json.loads(done.out)["tar"] == f"{CPU_STACK}.tar"
    assert (small_checkout / f"{CPU_STACK}.tar").exists()
