"""docs/guides/first-amd-host.md, line by line, on a made-up host of eight MI300X: its table holds.

Steps 4 to 6 (explain, lock, build) are test_rocm_mirror.py's; 9 and 10 test_first_amd_host.py's; 11 and 12
need a device, as a made-up result is never certified.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

pytest.importorskip("pydantic", reason="the judge runs on the host, and no image has it")
from typer.testing import CliRunner  # noqa: E402

import host_verdicts  # noqa: E402
import made_up  # noqa: E402
from stackcheck.cli import app  # noqa: E402
from stackcheck.suite.verdict import MADE_UP  # noqa: E402
from test_amd_hosts import IMAGES, NEW, run  # noqa: E402

pytestmark = pytest.mark.slow
PAGE = (made_up.ROOT / "docs/guides/first-amd-host.md").read_text(encoding="utf-8")
STEPS = {
    match[1]: tuple(cell.strip() for cell in match[2].split(" | "))
    for match in re.finditer(r"^\| (\d+)\. [\w ,]+ \| (.+) \|$", PAGE, re.MULTILINE)
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where step 3 leaves its files."""
    return tmp_path_factory.mktemp("step-3")


@pytest.fixture(scope="module")
def devices(folder: Path) -> Mapping[str, Any]:
    """The result of step 3."""
    return run("mi300x", NEW, folder)


def test_every_step_of_the_page_is_known_here() -> None:
    assert list(STEPS) == [str(number) for number in range(1, 13)]


def test_step_3_ends_without_a_failure_and_says_why_it_skips(devices: Mapping[str, Any]) -> None:
    command, expected, _ = STEPS["3"]
    assert "pytest tests/ --gpu-vendor amd -k devices" in command
    assert "no failure" in expected
    checks = devices["checks"].values()
    assert {check["outcome"] for check in checks} == {"passed", "skipped"}
    assert all(check["reason"] for check in checks if check["outcome"] == "skipped")


def test_step_7_passes_on_a_healthy_machine(devices: Mapping[str, Any], folder: Path) -> None:
    found = host_verdicts.judged(devices, folder, IMAGES[NEW.release][1])
    assert f"`{found.status}`" in STEPS["7"][1]
    assert found.status == "PASSED"


def test_step_8_prints_the_drivers_line_and_the_class_of_the_bounds(
    devices: Mapping[str, Any], folder: Path
) -> None:
    host_verdicts.judged(devices, folder)
    done = CliRunner().invoke(app, ["judge", str(folder / "whole.json"), "--json"])
    told = json.loads(done.stdout)
    assert (done.exit_code, told["reasons"]) == (6, [MADE_UP])  # and nothing else
    assert told["driver"]["state"] in {"listed", "unlisted"}
    assert set(told["bounds"]) == {"derived", "published"}
    assert all(word in STEPS["8"][1] for word in ("`listed`", "not listed", *told["bounds"]))
