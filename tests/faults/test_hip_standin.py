"""AMD's code path without a GPU: the suite's binding of RCCL, and what a child's variables show of HIP.

The libraries are stand-ins (fakehip), compiled here. What that proves, and what not, is on
docs/reference/amd.md.
"""

import ctypes
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fakehip
import planting
from vendors import Device, amd, amd_kernel, amd_software, software

IDS = tuple(f"GPU-a1b2c3d4e5f6070{number}" for number in range(4))
QUERY = """
import ctypes, json, sys
hip = ctypes.CDLL(sys.argv[1])
count, uuid, found = ctypes.c_int(), ctypes.create_string_buffer(16), []
hip.hipGetDeviceCount(ctypes.byref(count))
for device in range(count.value):
    assert hip.hipDeviceGetUuid(uuid, device) == 0
    found.append(uuid.raw.hex())
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> tuple[Path, Path]:
    made = fakehip.found(tmp_path_factory.mktemp("fakehip"))
    return made or pytest.skip("no gcc, and build/fakehip is not there: python tests/faults/fakehip makes it")


def collectives(folder: Path, ranks: int, stacks: Path, fault: str = "") -> dict[str, Any]:
    env = {"FAKEHIP_DEVICES": ",".join(IDS), "FAKEHIP_FAULT": fault, "GLOO_SOCKET_IFNAME": "lo"}
    return planting.program("hip_collectives.py", str(folder), ranks=ranks, stacks=stacks, **env)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_suites_binding_of_rccl_gives_right_results(suite_python, libraries, tmp_path, ranks):
    assert suite_python
    report = collectives(libraries[0].parent, ranks, tmp_path)
    assert report["wrong"] == dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather", "all_to_all"), 0)
    assert report["holder"] == "librccl.so.1"
    assert tuple(report["version"]) == (2, 27, 7)
    assert tuple(report["runtime"]) == (7, 2)
    assert report["elapsed_ms"] > 0
    assert "answered 4" in report["bad_stream"]  # ncclInvalidArgument


@pytest.mark.parametrize(
    ("fault", "operations"),
    [
        ("last", {"all_reduce", "reduce_scatter", "all_gather"}),
        pytest.param("peer", {"all_reduce", "reduce_scatter"}, marks=pytest.mark.slow),
        ("swap", {"all_to_all"}),
    ],
)
def test_a_wrong_collective_is_seen(suite_python, libraries, tmp_path, fault, operations):
    assert suite_python
    wrong = collectives(libraries[0].parent, 2, tmp_path, fault)["wrong"]
    assert {op for op, elements in wrong.items() if elements} == operations


def shown(hip: Path, environment: dict[str, str]) -> list[str]:
    """The ids of the devices that a process with these variables has, in HIP's order."""
    command = (sys.executable, "-c", QUERY, str(hip))
    variables = {"PATH": os.environ["PATH"], "FAKEHIP_DEVICES": ",".join(IDS), **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    return [amd.torch_uuid(uuid) for uuid in json.loads(done.stdout)]


def gpu(number: int, **changes: Any) -> Device:
    plain: dict[str, Any] = {"name": "", "arch": "gfx942", "compute_units": 304, "memory_bytes": 1}
    bdf = f"0000:0{number}:00.0"
    return Device(index=number, uuid=IDS[number], bdf=bdf, **{**plain, **changes})


@pytest.mark.parametrize("numbers", [[0], [2], [1, 3], [3, 1], [0, 1, 2, 3], []])
def test_a_child_has_just_the_devices_that_it_was_given(libraries, numbers, monkeypatch):
    nodes = tuple(amd_kernel.Node(2 + i, gpu(i).bdf, 0, {}, 1) for i in range(4))
    monkeypatch.setattr(amd_kernel, "nodes", lambda: nodes)
    found = shown(libraries[0], amd.child_environment([gpu(number) for number in numbers]))
    assert found == [IDS[number] for number in numbers]


def test_partitions_are_chosen_by_number_because_they_share_an_id(libraries, monkeypatch):
    parts = [gpu(0, part=part, partition={"compute": "CPX", "memory": "NPS4"}) for part in range(4)]
    nodes = tuple(amd_kernel.Node(2 + part, parts[0].bdf, part, {}, 1) for part in range(4))
    monkeypatch.setattr(amd_kernel, "nodes", lambda: nodes)
    environment = amd.child_environment([parts[3], parts[1]])
    assert environment[amd.VISIBILITY] == "3,1"
    assert shown(libraries[0], environment) == [IDS[3], IDS[1]]


def test_what_a_user_chose_is_what_hip_shows(libraries, monkeypatch):
    """The suite's own reading of the variables and a runtime that obeys them agree."""
    monkeypatch.setattr(
        amd_kernel, "nodes", lambda: tuple(amd_kernel.Node(2 + i, gpu(i).bdf, 0, {}, 1) for i in range(4))
    )
    monkeypatch.setattr(amd_kernel, "render_nodes", lambda: ())
    for chosen in (
        {"ROCR_VISIBLE_DEVICES": "2,3", "HIP_VISIBLE_DEVICES": "1"},
        {"ROCR_VISIBLE_DEVICES": f"{IDS[1]},{IDS[0]}"},
        {"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "0,9,1"},
        {"ROCR_VISIBLE_DEVICES": ""},
    ):
        for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in chosen.items():
            monkeypatch.setenv(name, value)
        ours = {device.uuid for device in amd._visible([gpu(number) for number in range(4)])}
        assert ours == set(shown(libraries[0], chosen)), chosen


def test_versions_are_read_from_the_loaded_libraries(libraries):
    hip, rccl = libraries
    assert amd_software._hip(ctypes.CDLL(str(hip), mode=ctypes.RTLD_GLOBAL)) == (7, 2)
    assert software.nccl(ctypes.CDLL(str(rccl))) == (2, 27, 7)
