"""Device leases: one file lock per physical device. In: a `Wish`. Out: a held `Lease`.

Containers may share the lock folder: the locks are flocks, so a killed holder leaves no lock behind. A
turnstile keeps the waiting fair: the process that waits holds it, so a check that needs eight devices is not
starved by checks that need one. A `Keeper` keeps a lease that the next check needs too.

What else may run is the lease's `Use`. Small correctness checks share a device, because they leave it idle
most of the time. Two locks of the machine keep speed apart from the rest: checks of correctness hold
`machine` together, checks of single devices' speed hold `quiet` together, and a check that is alone holds
both.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vendors import Device

POLL_S = 0.05
WAIT_S = 2 * 3600.0  # a soak check of another worker may hold a device this long
# How a check uses its devices, and what may run beside it:
#   shared  other checks on the same device, too
#   whole   other checks of correctness, on other devices
#   quiet   only other quiet checks, on other devices
#   alone   nothing
Use = Literal["shared", "whole", "quiet", "alone"]
# Checks that share a device: each leaves it idle most of the time. On an H100, 3 of 105 took more than 9 GiB
# and the largest 13. A check that finds no memory beside others runs again with the device whole.
MOST_SHARERS, BYTES_PER_SHARER = 8, 9 << 30


class LeaseError(Exception):
    """The lock directory cannot be used, or a device was not freed in time."""


@dataclass(frozen=True)
class Lease:
    """Devices that this process holds until the context ends, in index order."""

    devices: tuple[Device, ...]
    use: Use


def default_folder() -> Path:
    """The lock folder without --lease-dir: one per machine, for all users and containers."""
    return Path("/tmp/stackcheck-leases")


@contextlib.contextmanager
def hold(
    folder: Path,
    devices: Sequence[Device],
    count: int,
    *,
    use: Use,
    unlocked: bool = False,
    wait_s: float = WAIT_S,
) -> Iterator[Lease]:
    """Hold `count` of the devices; `unlocked` ones (a CPU) need no lock.

    Raises:
        LeaseError: They were not free within `wait_s`, or the folder cannot be used.
    """
    _make(folder)
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as held:
        with _locked(folder / "turnstile.lock", fcntl.LOCK_EX, deadline):
            _take_machine(held, folder, use, deadline)
            choices = functools.partial(_choices, folder, devices, use)
            chosen = tuple(devices) if unlocked else _take(held, choices, count, deadline)
        yield Lease(devices=chosen, use=use)


@dataclass(frozen=True)
class Wish:
    """What a check asks for. Checks of different groups never share a lease."""

    group: str
    count: int
    use: Use


def sharers(device: Device) -> int:
    """How many checks may share a device: the number that its memory is enough for."""
    return max(1, min(MOST_SHARERS, device.memory_bytes // BYTES_PER_SHARER))


class Keeper:
    """The one lease of this process, kept while the next check has the same wish.

    Checks of a file share launches and a worker. If another process took the devices between two of them,
    each check would wait for all devices again.
    """

    def __init__(self, folder: Path, devices: Sequence[Device], *, unlocked: bool) -> None:
        self._folder, self._devices, self._unlocked = folder, devices, unlocked
        self._held = contextlib.ExitStack()
        self._wish: Wish | None = None
        self._lease: Lease | None = None

    def take(self, wish: Wish) -> Lease:
        """Wait for the devices of this wish, and hold them. Raises `LeaseError`."""
        if self._lease is None or self._wish != wish:
            self.give_back()
            asked = hold(self._folder, self._devices, wish.count, use=wish.use, unlocked=self._unlocked)
            self._lease, self._wish = self._held.enter_context(asked), wish
        return self._lease

    def have_whole(self, lease: Lease) -> None:
        """Wait until this process alone uses the devices of a shared lease, and hold them.
        Raises `LeaseError`.
        """
        if lease.use == "shared" and not self._unlocked:
            self.give_back()
            self._held.enter_context(hold(self._folder, lease.devices, len(lease.devices), use="whole"))

    def give_back(self) -> None:
        """Free the devices, if any are held."""
        self._lease = self._wish = None
        self._held.close()


def _take_machine(held: contextlib.ExitStack, folder: Path, use: Use, deadline: float) -> None:
    """Wait until no check runs that this use excludes, and keep those out that start later.

    Only the holder of the turnstile calls this, so nobody else takes a lock that was only tried here.
    """
    machine, quiet = folder / "machine.lock", folder / "quiet.lock"
    for path, holds in ((machine, use in ("shared", "whole")), (quiet, use == "quiet")):
        if use == "alone":
            held.enter_context(_locked(path, fcntl.LOCK_EX, deadline))
        elif holds:
            held.enter_context(_locked(path, fcntl.LOCK_SH, deadline))
        else:
            with _locked(path, fcntl.LOCK_EX, deadline):
                pass


Locks = Sequence[tuple[Path, int]]


def _take(
    held: contextlib.ExitStack,
    choices: Callable[[], Iterable[tuple[Device, Locks]]],
    count: int,
    deadline: float,
) -> tuple[Device, ...]:
    taken: dict[int, Device] = {}
    while True:
        for device, locks in choices():
            if len(taken) < count and device.index not in taken and _hold_all(held, locks):
                taken[device.index] = device
        if len(taken) == count:
            return tuple(taken[index] for index in sorted(taken))
        _wait(deadline, f"{count} devices")


def _choices(folder: Path, devices: Sequence[Device], use: Use) -> Iterator[tuple[Device, Locks]]:
    """Each device with the locks that its use takes.
    A shared device comes once for each place: first the first places of all devices, then the second ones.
    """
    # Both are the same however the devices are numbered or hidden.
    keys = {d.index: hashlib.sha256(f"{d.uuid} {d.bdf}".encode()).hexdigest()[:16] for d in devices}
    names = {index: folder / f"device-{key}.lock" for index, key in keys.items()}
    if use != "shared":
        yield from ((device, [(names[device.index], fcntl.LOCK_EX)]) for device in devices)
        return
    for place in range(MOST_SHARERS):
        for device in devices:
            if place < sharers(device):
                name = names[device.index]
                own = name.with_name(f"{name.stem}-{place}.lock")
                yield device, [(name, fcntl.LOCK_SH), (own, fcntl.LOCK_EX)]


def _hold_all(held: contextlib.ExitStack, locks: Locks) -> bool:
    """Take all of these locks, or none."""
    taken: list[int] = []
    for path, how in locks:
        descriptor = _try_lock(path, how)
        if descriptor is None:
            for other in taken:
                os.close(other)
            return False
        taken.append(descriptor)
    for descriptor in taken:
        held.callback(os.close, descriptor)
    return True


@contextlib.contextmanager
def _locked(path: Path, how: int, deadline: float) -> Iterator[None]:
    while (descriptor := _try_lock(path, how)) is None:
        _wait(deadline, str(path))
    try:
        yield
    finally:
        os.close(descriptor)


def _try_lock(path: Path, how: int) -> int | None:
    try:
        descriptor = _opened(path)
    except OSError as error:
        raise LeaseError(f"{path}: {error.strerror}; name a writable folder with --lease-dir") from error
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True)
        folder.chmod(0o1777)  # for every uid; the umask would narrow the mode of mkdir
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise LeaseError(f"{folder}: not a folder; name another one with --lease-dir") from None
    except OSError as error:
        raise LeaseError(f"{folder}: {error.strerror}; name a writable folder with --lease-dir") from error


def _opened(path: Path) -> int:
    """Open a lock file that every uid may use: uids in a container and on its host differ.

    An existing file is opened without O_CREAT, which Linux refuses in a sticky folder if the file belongs to
    another user.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # another process created it in the meantime
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(descriptor, 0o666)
    return descriptor


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise LeaseError(
            f"{what} was not free in time: another run holds it; `fuser LOCKFILE` names the process"
        )
    time.sleep(POLL_S)
