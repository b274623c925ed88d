"""AMD's own Python modules of ROCm 6.2 to 7.0 over a stand-in for their library: one device is read.

The real libraries of 6.1.2 and 10.1 run in tests/faults/test_amd_hosts.py. Between them calls, keys,
structures and enumerations changed. These packages of the index are AMD's, and only libamd_smi.so is missing.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import amdsmi_releases
from fakeamd import rootfs
from waits import run_program

pytestmark = pytest.mark.integration
PROGRAM = Path(__file__).resolve().parents[1] / "faults/amdsmi_standin.py"
RELEASES = tuple(amdsmi_releases.table())
WITH_PROFILES = (
    "6.3.3",
    "6.4.3",
    "7.0.2",
)  # these answer "N/A" where the driver has no profile, and raise nothing


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("amdsmi")
    for release in RELEASES:
        install = (sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile")
        subprocess.run((*install, "--target", str(folder / release), f"amdsmi=={release}"), check=True)
    return folder


def read(packages: Path, release: str, plan: str) -> dict[str, Any]:
    done = run_program((sys.executable, str(PROGRAM), str(packages / release), plan), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("release", RELEASES)
def test_each_generation_reads_the_same_device(packages, release):
    found = read(packages, release, "healthy")
    assert found["devices"] == 2
    assert (found["pci_id"], found["uuid"], found["bdf"]) == (
        "1002:74a1",
        "GPU-a1b2c3d4e5f60700",
        "0000:05:00.0",
    )
    assert found["memory_bytes"] == 192 << 30
    assert found["power_cap_w"] == 750
    assert found["uncorrectable"] == 1 + 2  # a deferred error is one that nobody has read yet
    assert found["link"] == {"kind": "xgmi", "p2p": True, "links": 2}
    assert found["partition"] == {"compute": "SPX", "memory": "NPS1"}
    assert found["called"] >= 20


@pytest.mark.parametrize("release", WITH_PROFILES)
def test_a_partition_is_seen_where_the_module_answers_na(packages, release):
    assert read(packages, release, "no profile")["partition"] == {"compute": "CPX", "memory": "NPS1"}
    assert read(packages, release, "cpx")["partition"]["compute"] == "CPX"


@pytest.mark.parametrize("release", RELEASES)
def test_no_permission_is_no_value(packages, release):
    found = read(packages, release, "no permission")
    assert found["uncorrectable"] == "no permission"
    assert found["link"]["p2p"] == "no permission"


@pytest.mark.parametrize("release", RELEASES)
def test_drivers_without_and_with_a_new_version_are_unlisted(packages, release):
    kernel = read(packages, release, "kernel")
    assert (kernel["driver"], kernel["support"]) == ("N/A", "unlisted")
    new = read(packages, release, "new")
    assert (new["driver"], new["support"]) == ("6.19.14.31400000", "unlisted")


@pytest.mark.parametrize("release", RELEASES)
def test_the_table_has_what_each_release_does_not_tell(packages, release):
    """The fabricated hosts of tests/faults/test_amd_releases.py go by it."""
    newest = rootfs.ensure(rootfs.LIBRARIES[-1]) / "usr/lib/python3/dist-packages"
    found = amdsmi_releases.lacking(amdsmi_releases.told(packages / release), amdsmi_releases.told(newest))
    table = dict(amdsmi_releases.table())
    if os.environ.get("STACKCHECK_WRITE_GOLDEN"):
        table[release] = {**table[release], **found}
        amdsmi_releases.FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    assert {name: table[release][name] for name in found} == found
