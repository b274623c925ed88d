"""Publishing under fire, on a real registry: benchmarks/publishing.py, in a short mode."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from small_images import STACK_ID, SmallImage, quiet
from stackcheck.certificate import publish
from stackcheck.certificate.statement import Envelope
from stackcheck.oci.layout import OciLayout

Campaign = Callable[..., dict[str, Any]]

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.integration


@pytest.fixture
def campaign(registry: str) -> Campaign:
    """The program, where the package of the registry is installed."""
    assert registry

    def run(*arguments: str) -> dict[str, Any]:
        command = [sys.executable, ROOT / "benchmarks" / "publishing.py", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        assert found["wrong"] == []
        assert done.returncode == 0, done.stderr
        assert found["tampering"]["count"] >= 150
        assert sum(found["tampering"]["outcomes"].values()) == found["tampering"]["count"]
        return found

    return run


@pytest.mark.slow
def test_a_short_campaign_finds_nothing_wrong_and_goes_on_from_its_record(campaign, tmp_path):
    count = (
        "--boundaries",
        "4",
        "--kills",
        "2",
        "--schedules",
        "6",
        "--commands",
        "9",
        "--disks",
        "30",
        "--races",
        "2",
        "--fuzz-s",
        "5",
    )
    record = tmp_path / "record"
    found = campaign("--seed", "2", *count, "--record", str(record))
    assert found["boundary"]["schedules"] == 4
    assert found["instant"]["schedules"] == 2
    assert found["command"]["schedules"] == 9
    assert found["disk"]["planted"] == {"SIGKILL": 10, "ENOSPC": 10, "EIO": 10}
    assert found["race"]["schedules"] == 2
    assert sum(found["fault"]["planted"].values()) > 0
    assert found["fuzz"]["count"] > 10
    lines = record.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["part"] != "boundary"]
    record.write_text("".join(kept[:-1]))
    again = campaign("--seed", "2", *count, "--record", str(record))
    assert len(record.read_text().splitlines()) == len(lines), "what the record lacked, once"
    assert again["boundary"]["schedules"] == 4


@pytest.mark.slow
def test_a_publisher_that_moves_the_tag_too_early_is_found(registry_program, tmp_path, monkeypatch):
    """The campaign can find something: a kill after such a tag leaves it on what is not certified."""
    assert registry_program
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    disturbed, publishers = (importlib.import_module(f"fire.{name}") for name in ("disturbed", "publishers"))
    honest = publishers.release

    def careless(store: Any, image: SmallImage, envelopes: tuple[Envelope, ...]) -> None:
        source = OciLayout(image.layout)
        publish._copy_image(source, source.only_manifest(), store, quiet)
        store.write_manifest(source.only_manifest(), STACK_ID)
        honest(store, image, envelopes)

    with disturbed.registry(tmp_path / "registry") as host:
        found = publishers.Campaign(host, tmp_path / "images", 1, tmp_path / "registry" / "data")
        found.boundary(40)
        assert found.wrong == []
        monkeypatch.setattr(publishers, "release", careless)
        found.boundary(40)
    (wrong,) = found.wrong
    assert wrong.startswith("before: ")
