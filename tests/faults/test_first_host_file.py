"""The file of `stackcheck first-host`, made on fabricated hosts, makes the same host again: the same verdict.

The kernel's files are read inside the host, as a user would; then the device suite runs on the host that the
file describes.
"""

import json
from collections.abc import Mapping
from typing import Any

import pytest

import host_verdicts
import made_up
from fakeamd import host, kfd, recorded
from fakeamd.states import STATES
from test_amd_hosts import NEW, run

pytestmark = pytest.mark.slow
RECORD = (
    "import json, amd_record; print(json.dumps({'kernel_files': amd_record.record(),"
    " 'identities': amd_record.identities()}))"
)
# Healthy hosts of each kind, and faults that the files show at any time.
REPLAYED = (
    *("mi300x", "mi210-without-bridge", "mi250", "mi325x-guest", "mi300x-cpx-nps4", "two-of-eight"),
    *("driver-of-the-kernel", "ecc-before-run", "bad-pages", "pcie-x8", "pcie-pair", "xgmi-link-down"),
    *(
        "power-cap-lowered",
        "nps4",
        "cpx",
        "memory-short",
        "firmware-differs",
        "gpu-missing",
        "numa-elsewhere",
    ),
    "throttling-mi250",
)


def record(state: str) -> dict[str, Any]:
    """What the host-side reader finds inside a fabricated host."""
    binds = {"vendors": made_up.ROOT / "stackcheck/vendors"}
    path = {"PYTHONPATH": "/stackcheck/vendors"}
    done = host.run(STATES[state], NEW, ["python3", "-c", RECORD], binds=binds, environment=path)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def outcomes(result: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    return {name: (check["outcome"], check["reason"]) for name, check in result["checks"].items()}


@pytest.mark.parametrize("state", REPLAYED)
def test_a_replayed_host_has_the_verdict_of_the_host(state, tmp_path):
    first, again = tmp_path / "first", tmp_path / "again"
    first.mkdir()
    again.mkdir()
    (tmp_path / "first-host.json").write_text(json.dumps(record(state)), encoding="utf-8")
    result, replayed = run(state, NEW, first), run(tmp_path / "first-host.json", NEW, again)
    assert outcomes(replayed) == outcomes(result)
    assert host_verdicts.judged(replayed, again) == host_verdicts.judged(result, first)


@pytest.mark.parametrize("state", ["mi300x", "mi210", "mi300x-cpx-nps4"])
def test_the_file_has_no_identity_of_a_gpu(state):
    found = record(state)
    gpus = range(STATES[state].gpus)
    own = {form(kfd.UNIQUE_ID + gpu) for gpu in gpus for form in (str, "{:x}".format)} | {str(kfd.HIVE)}
    files = json.dumps(found["kernel_files"])
    assert own <= set(found["identities"])
    assert not [one for one in found["identities"] if one in files]
    assert "serial_number" not in files
    assert len(
        {files for path, files in found["kernel_files"].items() if path.endswith("/unique_id")}
    ) == len(gpus)


def test_a_file_of_an_unknown_product_says_so():
    files = record("mi300x")["kernel_files"]
    changed = {path: "0xffff" if path.endswith("/device") else text for path, text in files.items()}
    with pytest.raises(recorded.FakeAmdError, match="1002:ffff is no product"):
        recorded.state(changed)
    with pytest.raises(recorded.FakeAmdError, match="no AMD GPU"):
        recorded.state({})
