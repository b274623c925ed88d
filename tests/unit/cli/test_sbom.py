"""The verbs that take an image out of here, and that say what is in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from small_checkout import CPU_STACK, call

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]
REFERENCE = f"oci:dist:{CPU_STACK}"


@pytest.mark.usefixtures("fake_engine")
def test_the_json_is_the_document_that_was_signed(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "images")
    done = call(capsys, "sbom", REFERENCE, "--json")
    assert done.code == 0
    kept = json.loads((small_checkout / "build" / CPU_STACK / "sbom.json").read_text())
    assert json.loads(done.out) == kept
    assert kept["bomFormat"] == "CycloneDX"


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
