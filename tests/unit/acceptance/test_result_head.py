"""What the suites write about their own process: the host compares it with what it started."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

from harness import resultfile
from stackcheck import vendors
from vendors import cpu


def head(run_file: dict[str, Any]) -> dict[str, Any]:
    return resultfile.head(
        vendor="cpu", tier="smoke", run_id="ab" * 8, run_file=run_file, host=cpu.read(), arguments=[]
    )


def test_the_interpreter_is_the_one_that_runs():
    found = head({"interpreter": {"package": "deb:python3 1", "path": "/evil", "sha256": "evil"}})
    file = Path(os.path.realpath(sys.executable))
    assert found["interpreter"] == {
        "path": sys.executable,
        "file": str(file),
        "sha256": "sha256:" + hashlib.sha256(file.read_bytes()).hexdigest(),
        "package": "deb:python3 1",
    }


def test_the_devices_are_those_that_the_suites_found_with_the_ids_of_the_host():
    found = head({"host": {"devices": [{"id": "of the host"}]}})
    assert found["seen_devices"] == [device.id for device in vendors.host("cpu").devices]


def test_where_libraries_come_from_is_recorded(monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/rocm/lib")
    assert head({})["environment"]["LD_LIBRARY_PATH"] == "/opt/rocm/lib"
