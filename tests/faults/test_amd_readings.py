"""Absent readings of AMD's library, and stackcheck's own view of the same fabricated kernel files."""

import ctypes
import itertools
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fakeamd import host, sysfs, tree
from fakeamd.rootfs import FakeAmdError
from fakeamd.states import HEALTHY, STATES
from harness import listener, readings
from stackcheck.vendors import amd as host_side
from vendors import (
    Absence,
    Event,
    VendorAbsentError,
    amd,
    amd_device,
    amd_events,
    amd_kernel,
    amd_library,
    amd_links,
)


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
def test_an_absence_is_never_a_value(answer, meaning):
    found = amd_library.reading(answer)
    assert (type(found), found) == (type(meaning), meaning)


@settings(deadline=None, derandomize=True)
@given(count=st.integers(0, 1 << 40) | st.sampled_from([0xFFFE, 0xFFFF, 0x10000, 0xFFFFFFFE]))
def test_a_count_of_32_bits_or_more_has_no_absence_of_16(count):
    assume(count not in amd_library.COUNTER_ONES)
    assert amd_library.counter({"count": count}, "count") == count


@pytest.mark.parametrize("ones", amd_library.COUNTER_ONES)
def test_a_count_that_nobody_wrote_is_an_absence(ones):
    assert amd_library.counter({"count": ones}, "count") == Absence.ALL_ONES


@pytest.mark.parametrize(("code", "meaning"), [(77, Absence.NOT_SUPPORTED), (78, Absence.NO_PERMISSION)])
def test_a_status_is_known_by_the_modules_own_name(code, meaning):
    assert amd_library.ask(failing(code), "amdsmi_get") == meaning
    assert not meaning.is_failure


def test_a_call_that_the_release_lacks_is_not_supported():
    assert amd_library.ask(failing(77), "amdsmi_get_of_the_future") == Absence.NOT_SUPPORTED


@pytest.mark.parametrize(("code", "name"), [(79, "AMDSMI_STATUS_INVAL"), (4242, "status 4242")])
def test_any_other_error_is_an_absence_of_its_own_that_keeps_its_name(code, name):
    found = pickle.loads(pickle.dumps(amd_library.ask(failing(code), "amdsmi_get")))
    assert isinstance(found, Absence)
    assert found.is_failure
    assert name in found
    with pytest.raises(pytest.fail.Exception, match=f"link errors: the library answered {name}"):
        readings.known(found, "link errors")


def test_a_library_that_is_gone_is_raised_and_so_is_a_device_without_its_address():
    with pytest.raises(LibraryError):
        amd_library.ask(failing(80), "amdsmi_get")
    with pytest.raises(LookupError, match="amdsmi_get: no permission"):
        amd_library.demand(failing(78), "amdsmi_get")


def test_what_torch_prints_of_a_device_is_its_unique_id():
    """As torch 2.6 printed it on an MI300X (ROCm/ROCm#4203)."""
    assert amd.torch_uuid("66333330-6463-3464-3030-646565323262") == "GPU-f330dc4d00dee22b"


@pytest.mark.parametrize("state", HEALTHY, ids=lambda state: state.name)
def test_the_host_side_sees_the_fabricated_devices(state, tmp_path, monkeypatch):
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


def test_without_root_it_says_why(monkeypatch):
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
def test_an_event_of_the_power_cap_alone_is_no_fault(text, *, unfit):
    assert amd_events.is_unfit(text) is unfit


@pytest.mark.parametrize(
    ("told", "kernel", "cap"),
    [
        ("100000000", 1000.0, 1000.0),  # cut: 6.1.2 on an MI325X
        ("140000000", 1400.0, 1400.0),
        ("750000000", 750.0, 750.0),
        ("550000000", 750.0, 550.0),  # any other difference is the library's to tell
        ("100000000", None, 100.0),
    ],
)
def test_a_cap_that_lost_a_digit_is_the_kernels(told, kernel, cap, monkeypatch):
    monkeypatch.setattr(amd_kernel, "power_cap_w", lambda _bdf: kernel)
    smi = answering(amdsmi_get_power_cap_info={"power_cap": int(told), "default_power_cap": int(told)})
    assert amd_device._power(smi, None, "0000:05:00.0", Absence.NOT_SUPPORTED).cap_w == cap


def test_a_die_without_power_of_its_own_has_no_cap_to_judge():
    smi = answering(amdsmi_get_power_cap_info={"power_cap": 0, "default_power_cap": 0})
    found = amd_device._power(smi, None, "0000:05:00.0", Absence.NOT_SUPPORTED)
    assert {found.cap_w, found.default_cap_w, found.draw_w} == {Absence.NOT_AVAILABLE}


def answering(**calls: object) -> SimpleNamespace:
    """A module whose calls give these answers."""
    return SimpleNamespace(
        AmdSmiLibraryException=LibraryError,
        amdsmi_wrapper=SimpleNamespace(),
        **{name: lambda *_, value=value: value for name, value in calls.items()},
    )


@settings(deadline=None, derandomize=True)
@given(st.integers(3, 8), st.data())
def test_a_link_that_is_down_is_that_of_two_devices_that_miss_one_in_any_order(count, data):
    """Each device lists its links in an order of its own, without the addresses of its peers."""
    pairs = list(itertools.combinations(range(count), 2))
    down = data.draw(st.sampled_from(pairs))
    ends = {}
    for index in range(count):
        states = ["U"] * (count - 1 - (index in down)) + ["D"] * (index in down)
        order = tuple(data.draw(st.permutations([*states, "X"])))
        node = amd_kernel.Node(index, f"0000:0{index}:00.0", 0, {}, 1)
        ends[index] = amd_links.End(None, node, order, 0, errors_cleared=False)
    with mock.patch.object(amd_kernel, "are_linked", lambda one, other: one != other):
        short = amd_links.short_of_links(ends)
    found = {
        pair: amd_links._active(ends[pair[0]], ends[pair[1]], short & {*pair}, alone=len(short) == 1)
        for pair in pairs
    }
    assert found == {pair: "down" if pair == down else "up" for pair in pairs}


def test_an_event_is_of_the_device_with_its_address_or_number():
    """10.1 names a GPU by a pointer, of which each call makes another object; 6.1.2 by a number."""
    pointers = {index: ctypes.c_void_p(4096 + index) for index in range(3)}
    assert amd_events._index(ctypes.c_void_p(4098), pointers) == 2
    assert amd_events._index(7, {0: 5, 1: 7}) == 1
    assert amd_events._index(9, {0: 5, 1: 7}) == -1


def test_one_reader_gives_the_events_of_all_devices():
    event = {"event": "VMFAULT", "message": "1089:python3", "processor_handle": 7}
    smi = SimpleNamespace(
        AmdSmiLibraryException=LibraryError,
        amdsmi_wrapper=SimpleNamespace(),
        AmdSmiEvtNotificationType=[SimpleNamespace(name="VMFAULT")],
        AmdSmiEventReader=lambda handle, _kinds: SimpleNamespace(read=lambda _ms: [event] * (handle == 5)),
    )
    events = amd_events.listen(smi, {0: 5, 1: 7})
    assert not isinstance(events, Absence)
    assert next(events) == Event(index=1, what="a memory page fault (1089:python3)", machine=False)


def module(folder: Path, text: str) -> Path:
    (folder / "amdsmi.py").write_text(text, encoding="utf-8")
    return folder


def test_a_module_of_another_release_than_its_library_says_so(tmp_path, monkeypatch):
    """AMD's modules look up every function while they are imported."""
    text = "import ctypes\nctypes.CDLL(None).amdsmi_get_gpu_of_another_release\n"
    monkeypatch.syspath_prepend(module(tmp_path, text))
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(VendorAbsentError, match=r"have different releases: .*amdsmi_get_gpu_of_another"):
        amd_library._import()


def test_a_library_that_reads_events_forever_ends_with_the_run(tmp_path, monkeypatch):
    """As over a driver's descriptor that blocks: the child cannot see that its pipe closed."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "sitecustomize.py").write_text(
        "import sys, threading, types\n"
        "def listen():\n    yield threading.Event().wait()\n"
        "sys.modules['vendors.amd'] = types.SimpleNamespace(listen=listen)\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setattr(listener, "END_S", 0.5)
    child = listener.Listener(tmp_path / "faults.jsonl")
    child.start("amd")
    assert child.reports().listening, child.reports()
    child.stop()
    assert not child.reports().listening
