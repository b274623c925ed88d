"""Leases: no device is held twice, performance checks are alone, and a killed holder leaves no lock
behind.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import signal
import stat
import time

import pytest

import waits
from harness import calls as run_by
from harness import evidence, leases, processes
from harness.check import Check
from vendors import Device, Host, Process

pytestmark = pytest.mark.catches("the harness")


def device(index: int) -> Device:
    return Device(
        index=index,
        uuid=f"u{index}",
        bdf=f"0000:0{index}:00.0",
        name="",
        arch="",
        compute_units=1,
        memory_bytes=1,
    )


EIGHT = tuple(device(index) for index in range(8))
PAIR = tuple(dataclasses.replace(device(index), memory_bytes=64 << 30) for index in range(2))


def take(folder, count, use, seconds, log) -> None:
    with leases.hold(folder, EIGHT, count, use=use) as lease:
        started = time.monotonic()
        time.sleep(seconds)
        log.put(([device.index for device in lease.devices], use, started, time.monotonic()))


def held_by_many(folder, wishes) -> list[tuple]:
    context = multiprocessing.get_context("fork")
    log = context.Queue()
    processes = [context.Process(target=take, args=(folder, *wish, 0.1, log)) for wish in wishes]
    for process in processes:
        process.start()
    records = [log.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    return records


def overlap(a, b) -> bool:
    return a[2] < b[3] and b[2] < a[3]


MAY_RUN_BESIDE = {
    "shared": {"shared", "whole"},
    "whole": {"shared", "whole"},
    "quiet": {"quiet"},
    "alone": set(),
}


def test_only_what_may_run_beside_each_other_does(tmp_path):
    wishes = [(1, "shared")] * 20 + [
        (1, "whole"),
        (8, "whole"),
        (4, "whole"),
        (1, "alone"),
        (8, "alone"),
        (2, "whole"),
        *[(1, "quiet")] * 4,
    ] * 2
    records = held_by_many(tmp_path, wishes)
    assert len(records) == len(wishes)
    for number, a in enumerate(records):
        for b in records[number + 1 :]:
            if overlap(a, b):
                assert b[1] in MAY_RUN_BESIDE[a[1]], f"{b[1]} ran beside {a[1]}"
                assert not set(a[0]) & set(b[0]) or {a[1], b[1]} == {"shared"}, "one device was held twice"


def test_as_many_checks_share_a_device_as_its_memory_is_enough_for(tmp_path):
    large = dataclasses.replace(device(0), memory_bytes=3 * leases.BYTES_PER_SHARER + 1)
    with contextlib.ExitStack() as held:
        for _ in range(3):
            held.enter_context(leases.hold(tmp_path, [large], 1, use="shared"))
        with pytest.raises(leases.LeaseError), leases.hold(tmp_path, [large], 1, use="shared", wait_s=0.2):
            pass
        with pytest.raises(leases.LeaseError), leases.hold(tmp_path, [large], 1, use="whole", wait_s=0.2):
            pass


@pytest.mark.healthy
def test_checks_share_a_device_only_when_every_device_has_one(tmp_path):
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(leases.hold(tmp_path, PAIR, 1, use="shared")) for _ in range(4)]
    assert [lease.devices[0].index for lease in taken] == [0, 1, 0, 1]


def test_a_shared_device_is_waited_for_before_it_is_judged(tmp_path):
    ours, other = (leases.Keeper(tmp_path, PAIR, unlocked=False) for _ in range(2))
    lease = ours.take(leases.Wish("test_a.py", 1, use="shared"))
    beside = [other.take(leases.Wish(f"test_{n}.py", 1, use="shared")) for n in "bc"][-1]
    assert beside.devices[0].index == 1, "the wait below would be for nobody"
    ours.have_whole(lease)
    with pytest.raises(leases.LeaseError), leases.hold(tmp_path, lease.devices, 1, use="shared", wait_s=0.2):
        pass
    ours.give_back()
    other.give_back()


@pytest.mark.healthy
def test_devices_come_in_index_order(tmp_path):
    with (
        leases.hold(tmp_path, EIGHT, 3, use="whole") as first,
        leases.hold(tmp_path, EIGHT, 2, use="whole") as second,
    ):
        assert [device.index for device in first.devices] == [0, 1, 2]
        assert [device.index for device in second.devices] == [3, 4]


def test_killed_holder_leaves_nothing_behind(tmp_path):
    context = multiprocessing.get_context("fork")
    holder = context.Process(target=take, args=(tmp_path, 8, "alone", 600, context.Queue()))
    holder.start()
    waits.until((tmp_path / "machine.lock").exists, "the lock of the machine")
    time.sleep(0.2)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join(10)
    with leases.hold(tmp_path, EIGHT, 8, use="alone", wait_s=60) as lease:
        assert len(lease.devices) == 8


def test_device_that_is_not_freed_is_an_error_and_no_endless_wait(tmp_path):
    with (
        leases.hold(tmp_path, EIGHT, 8, use="whole"),
        pytest.raises(leases.LeaseError, match="was not free in time"),
        leases.hold(tmp_path, EIGHT, 1, use="whole", wait_s=0.3),
    ):
        pass


def keeper(folder) -> leases.Keeper:
    return leases.Keeper(folder, EIGHT, unlocked=False)


def is_free(folder, count: int) -> bool:
    try:
        with leases.hold(folder, EIGHT, count, use="whole", wait_s=0.2):
            return True
    except leases.LeaseError:
        return False


def test_nobody_slips_in_between_two_checks_with_the_same_wish(tmp_path):
    ours = keeper(tmp_path)
    first = ours.take(leases.Wish("test_a.py", 8, use="whole"))
    assert ours.take(leases.Wish("test_a.py", 8, use="whole")) is first
    assert not is_free(tmp_path, 1)
    ours.give_back()
    assert is_free(tmp_path, 8)


@pytest.mark.parametrize(
    "other",
    [
        leases.Wish("test_a.py", 2, use="whole"),
        leases.Wish("test_a.py", 8, use="alone"),
        leases.Wish("test_b.py", 8, use="whole"),
    ],
    ids=["fewer devices", "alone", "another file"],
)
def test_another_wish_gives_the_kept_lease_back_first(tmp_path, other):
    ours = keeper(tmp_path)
    kept = ours.take(leases.Wish("test_a.py", 8, use="whole"))
    taken = ours.take(other)
    assert taken is not kept
    assert (len(taken.devices), taken.use) == (other.count, other.use)
    assert is_free(tmp_path, 1) is (other.count == 2)
    ours.give_back()


def test_another_uid_may_take_what_a_narrow_umask_made(tmp_path):
    before = os.umask(0o077)
    try:
        with leases.hold(tmp_path / "leases", EIGHT, 1, use="whole"):
            pass
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o1777
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "leases").iterdir()}
    assert modes == {0o666}


def test_a_link_in_the_place_of_a_lock_is_not_followed(tmp_path):
    (tmp_path / "turnstile.lock").symlink_to(tmp_path / "made")
    with pytest.raises(leases.LeaseError), leases.hold(tmp_path, EIGHT, 1, use="whole"):
        pass
    assert not (tmp_path / "made").exists()


GIB = 1 << 30


def seen(*processes: Process, used: int) -> Host:
    one = dataclasses.replace(device(0), processes=processes, memory_used_bytes=used)
    return Host(vendor="nvidia", library="", driver="", devices=(one,))


@pytest.mark.parametrize(
    ("processes", "used", "alone"),
    [
        ((Process(pid=7, memory_bytes=3 * GIB),), 4 * GIB, True),
        ((Process(pid=8, memory_bytes=3 * GIB),), 4 * GIB, False),
        ((Process(pid=7, memory_bytes=3 * GIB), Process(pid=8, memory_bytes=GIB)), 5 * GIB, False),
        ((Process(pid=7),), GIB, False),  # its memory is not known
        ((Process(pid=7, memory_bytes=3 * GIB),), 7 * GIB, False),  # more is in use than it has
        ((), 4 * GIB, False),
    ],
)
def test_an_own_process_stays_on_a_timed_device_only_where_nothing_else_is_there(processes, used, alone):
    now = evidence.without(seen(*processes, used=used), 7)
    assert (evidence.newly_shared(seen(used=GIB), now, now.devices) == []) is alone


@pytest.mark.parametrize(
    ("words", "lacks"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", True),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", True),
        ("HIP out of memory", True),
        ("AssertionError: 3 of 9 cases failed: got nan", False),
    ],
)
def test_a_failed_allocation_is_told_from_a_wrong_result(words, lacks):
    assert run_by.lacks_memory(words) is lacks


class Suite:
    """What `_with_memory` uses of a session."""

    shares_devices = False

    def __init__(self, keeper: leases.Keeper) -> None:
        self.keeper, self.worker = keeper, self

    def stop(self) -> None:
        pass


@pytest.mark.parametrize("use", ["shared", "whole"])
@pytest.mark.parametrize("raises", [True, False])
def test_a_check_that_finds_no_memory_beside_others_runs_again_without_them(tmp_path, use, raises):
    keeper = leases.Keeper(tmp_path, PAIR, unlocked=False)
    lease = keeper.take(leases.Wish("test_a.py", 1, use=use))
    calls = []

    def once() -> dict:
        calls.append(1)
        if len(calls) > 1:
            with (
                pytest.raises(leases.LeaseError),
                leases.hold(tmp_path, PAIR[:1], 1, use="shared", wait_s=0.1),
            ):
                pass
            return {}
        if raises:
            raise processes.WorkloadError("CUDA out of memory")
        return {"failures": ["HIP out of memory"]}

    check = Check(vendor="nvidia", model="H100")
    repeats = use == "shared"
    with pytest.raises(processes.WorkloadError) if raises and not repeats else contextlib.nullcontext():
        run_by._with_memory(once, Suite(keeper), lease, check)
    assert len(calls) == 1 + repeats
    assert ("memory" in check.more_evidence) is repeats
    keeper.give_back()
