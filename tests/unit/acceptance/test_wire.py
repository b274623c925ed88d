"""Readings come back from the process that took them with their types, and nothing else comes back."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "acceptance"))

import vendors
from vendors import Absence, cpu, wire

DEVICE = vendors.Device(
    index=0,
    uuid="GPU-1",
    bdf="0000:1b:00.0",
    name="a device",
    arch="sm_90",
    compute_units=Absence.NO_PERMISSION,
    memory_bytes=1,
    firmware={"vbios": "96", "kind": Absence.failed("NOT_FOUND")},
    processes=(vendors.Process(pid=0, name="python"),),
    throttle=vendors.Throttle(unfit=("thermal",), accumulators={"thermal": 3}, ticks=9),
)
HOST = vendors.Host(
    vendor="nvidia",
    library="nvml",
    driver="580",
    devices=(DEVICE,),
    links=(vendors.Link(a=0, b=1, kind="nvlink", p2p=True),),
)


@pytest.mark.parametrize(
    "value",
    [HOST, cpu.read(), cpu.sample((0, 1)), Absence.ALL_ONES],
    ids=["host", "cpu", "sample", "absence"],
)
def test_a_reading_comes_back_as_it_was(value: Any) -> None:
    found = wire.decoded(json.loads(json.dumps(wire.encoded(value))))
    assert found == value
    assert type(found) is type(value)


def test_an_absence_is_no_text() -> None:
    found = wire.decoded(json.loads(json.dumps(wire.encoded(HOST))))
    (device,) = found.devices
    assert isinstance(device.compute_units, Absence)
    assert device.firmware["kind"].is_failure
    assert not isinstance(device.name, Absence)


@pytest.mark.parametrize(
    "text", ['{"!": "Popen"}', '{"!": "Host"}', "{}", '{"!": "Device", "evil": 1}', '{"!": []}']
)
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        wire.decoded(json.loads(text))
