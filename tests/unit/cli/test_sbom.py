"""The verbs that take an image out of here, and that say what is in it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from small_checkout import CPU_STACK, call

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
