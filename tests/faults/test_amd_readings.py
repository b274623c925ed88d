"""Absent readings of AMD's library, and stackcheck's own view of the same fabricated kernel files."""

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from fakeamd import host, sysfs, tree  # noqa: E402
from fakeamd.gpu_metrics import encode, layout, offset  # noqa: E402
from fakeamd.rootfs import FakeAmdError  # noqa: E402
from fakeamd.states import HEALTHY, STATES, HostState  # noqa: E402
from harness import readings  # noqa: E402
from stackcheck.vendors import amd as host_side  # noqa: E402
from vendors import Absence, Device, amd, amd_events, amd_kernel, amd_library  # noqa: E402


class LibraryError(Exception):
    """As amdsmi's own: a number that only the module's names explain."""

    def get_error_code(self) -> int:
        return int(self.args[0])


def failing(code: int) -> SimpleNamespace:
    def call() -> None:
        raise LibraryError(code)

    names = ("NOT_SUPPORTED", "NO_PERM", "INVAL", "TIMEOUT")
    wrapper = SimpleNamespace(**{f"AMDSMI_STATUS_{name}": 77 + place for place, name in enumerate(names)})
    return SimpleNamespace(AmdSmiLibraryException=LibraryError, amdsmi_wrapper=wrapper, amdsmi_get=call)


@pytest.mark.parametrize(
    ("answer", "meaning"),
    [
        ("N/A", Absence.NOT_AVAILABLE),
        ("", Absence.NOT_AVAILABLE),
        (0xFFFF, Absence.ALL_ONES),
        (0xFFFFFFFF, Absence.ALL_ONES),
        (0xFFFFFFFFFFFFFFFF, Absence.ALL_ONES),
        (0, 0),
        (True, True),
        ("SPX", "SPX"),
    ],
)
def test_an_absence_is_never_a_value(answer: object, meaning: object) -> None:
    found = amd_library.reading(answer)
    assert (type(found), found) == (type(meaning), meaning)


@pytest.mark.parametrize(("code", "meaning"), [(77, Absence.NOT_SUPPORTED), (78, Absence.NO_PERMISSION)])
def test_a_status_is_known_by_the_modules_own_name(code: int, meaning: Absence) -> None:
    assert amd_library.ask(failing(code), "amdsmi_get") == meaning
    assert not meaning.is_failure


def test_a_call_that_the_release_lacks_is_not_supported() -> None:
    assert amd_library.ask(failing(77), "amdsmi_get_of_the_future") == Absence.NOT_SUPPORTED


@pytest.mark.parametrize(("code", "name"), [(79, "AMDSMI_STATUS_INVAL"), (4242, "status 4242")])
def test_any_other_error_is_an_absence_of_its_own_that_keeps_its_name(code: int, name: str) -> None:
    found = pickle.loads(pickle.dumps(amd_library.ask(failing(code), "amdsmi_get")))
    assert isinstance(found, Absence)
    assert found.is_failure
    assert name in found
    with pytest.raises(pytest.fail.Exception, match=f"link errors: the library answered {name}"):
        readings.known(found, "link errors")


def test_a_library_that_is_gone_is_raised_and_so_is_a_device_without_its_address() -> None:
    with pytest.raises(LibraryError):
        amd_library.ask(failing(80), "amdsmi_get")
    with pytest.raises(LookupError, match="amdsmi_get: no permission"):
        amd_library.demand(failing(78), "amdsmi_get")


def test_what_torch_prints_of_a_device_is_its_unique_id() -> None:
    """As torch 2.6 printed it on an MI300X (ROCm/ROCm#4203)."""
    assert amd.torch_uuid("66333330-6463-3464-3030-646565323262") == "GPU-f330dc4d00dee22b"


def gpu(index: int) -> Device:
    return Device(
        index=index,
        uuid=f"GPU-{index:016x}",
        bdf=f"0000:0{index}:00.0",
        name="",
        arch="gfx942",
        compute_units=304,
        memory_bytes=1,
    )


FOUR = tuple(gpu(index) for index in range(4))


@pytest.mark.parametrize(
    ("environment", "left"),
    [
        ({}, [0, 1, 2, 3]),
        ({"ROCR_VISIBLE_DEVICES": "0,1"}, [2, 3]),
        ({"ROCR_VISIBLE_DEVICES": f"{FOUR[1].uuid},{FOUR[3].uuid}", "HIP_VISIBLE_DEVICES": "0"}, [1]),
        ({"HIP_VISIBLE_DEVICES": "3", "CUDA_VISIBLE_DEVICES": "0"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [3]),
        ({"ROCR_VISIBLE_DEVICES": ""}, []),
    ],
)
def test_devices_are_chosen_by_the_kfds_numbers(
    environment: dict[str, str], left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the KFD numbers the devices in the reverse of the library's order."""
    nodes = [amd_kernel.Node(place, device.bdf, 0, {}, 1) for place, device in enumerate(reversed(FOUR))]
    monkeypatch.setattr(amd_kernel, "nodes", lambda: tuple(nodes))
    monkeypatch.setattr(amd_kernel, "render_nodes", lambda: ())
    for name in ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert [device.index for device in amd._visible(FOUR)] == left


@pytest.mark.parametrize(
    ("number", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (90500, "gfx950"), (0, "")]
)
def test_architectures_are_spelled_as_compilers_do(number: int, name: str) -> None:
    assert amd_kernel.architecture({"gfx_target_version": number}) == name


@pytest.mark.parametrize(("revision", "size"), [(3, 120), (8, 3872)])
def test_gpu_metrics_have_the_kernels_size(revision: int, size: int) -> None:
    assert len(encode(revision, {})) == size
    assert offset(3, "indep_throttle_status") == (amd_kernel.THROTTLE_OFFSET, 8)
    assert layout(revision) is layout(revision)


@pytest.mark.parametrize("state", HEALTHY, ids=lambda state: state.name)
def test_the_host_side_sees_the_fabricated_devices(
    state: HostState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree.write(tmp_path, sysfs.tree(state, 8))
    monkeypatch.setattr(host_side, "SYS", tmp_path)
    found, mode = host_side.devices(), f"{state.compute}/{state.memory}"
    model = state.product.name if state.parts == 1 else f"{state.product.name}-{mode.replace('/', '-')}"
    assert {device.model for device in found} == {model}
    assert {device.memory_bytes for device in found} == {state.product.memory_bytes // state.parts}
    assert len({device.id for device in found}) == len(found)  # leases go by it, also for partitions
    # A container's own view needs the kernel's refusals, which only the shim gives.
    assert state.given or len(found) == state.gpus * state.parts
    assert host_side.driver() == (state.driver or "85F6A8C2CC7AEEAF1C3BD41")
    assert host_side.partition() == (mode if state.product.partitions else None)


def test_a_state_changes_only_what_it_names() -> None:
    healthy, faulty = (sysfs.tree(STATES[name], 8) for name in ("mi300x", "power-cap-lowered"))
    changed = [path for path in healthy if healthy[path] != faulty[path]]
    assert [path.rpartition("/")[2] for path in changed] == ["power1_cap"]


def test_without_root_it_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(FakeAmdError, match="needs root"):
        host.run(STATES["mi300x"], host.rootfs.LIBRARIES[0], ["true"])


@pytest.mark.parametrize(
    ("text", "unfit"),
    [
        ("2:1", False),
        ("bitmask: 0x2 counter: 0x1", False),
        ("1000000002:1", True),
        ("bitmask: 0x1000000002 counter: 0x1", True),
        ("800000000000:4", True),  # PROCHOT
        ("0:1", True),
        ("throttled", True),
    ],
)
def test_an_event_of_the_power_cap_alone_is_no_fault(text: str, *, unfit: bool) -> None:
    assert amd_events.is_unfit(text) is unfit
