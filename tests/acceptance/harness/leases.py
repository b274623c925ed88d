"""Device leases: one file lock per physical device. In: a `Wish`. Out: a held `Lease`.

Containers may share the lock folder: the locks are flocks, so a killed holder leaves no lock behind. A
turnstile keeps the waiting fair: the process that waits holds it, so a check that needs eight devices is not
starved by checks that need one. A `Keeper` keeps a lease that the next check needs too. Correctness checks
share the machine's lock; a performance check holds it exclusively.
"""

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vendors import Device

POLL_S = 0.05
WAIT_S = 2 * 3600.0  # a soak check of another worker may hold a device this long


class LeaseError(Exception):
    """The lock directory cannot be used, or a device was not freed in time."""


@dataclass(frozen=True)
class Lease:
    """Devices that this process holds until the context ends, in index order."""

    devices: tuple[Device, ...]
    alone: bool


def default_folder() -> Path:
    """The lock folder without --lease-dir: one per machine, for all users and containers."""
    return Path("/tmp/stackcheck-leases")


def device_key(device: Device) -> str:
    """The lock's name, from UUID and bus address: both are the same however the devices are numbered or
    hidden.
    """
    return hashlib.sha256(f"{device.uuid} {device.bdf}".encode()).hexdigest()[:16]


@contextlib.contextmanager
def hold(
    folder: Path,
    devices: Sequence[Device],
    count: int,
    *,
    alone: bool,
    shared: bool = False,
    wait_s: float = WAIT_S,
) -> Iterator[Lease]:
    """Hold `count` of the devices; `shared` ones (a CPU) need no lock. Raises `LeaseError` after `wait_s`."""
    _make(folder)
    deadline = time.monotonic() + wait_s
    with contextlib.ExitStack() as held:
        with _locked(folder / "turnstile.lock", fcntl.LOCK_EX, deadline):
            how = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
            held.enter_context(_locked(folder / "machine.lock", how, deadline))
            chosen = tuple(devices) if shared else _take(held, folder, devices, count, deadline)
        yield Lease(devices=chosen, alone=alone)


@dataclass(frozen=True)
class Wish:
    """What a check asks for. Checks of different groups never share a lease."""

    group: str
    count: int
    alone: bool


class Keeper:
    """The one lease of this process, kept while the next check has the same wish.

    Checks of a file share launches and a worker. If another process took the devices between two of them,
    each check would wait for all devices again.
    """

    def __init__(self, folder: Path, devices: Sequence[Device], *, shared: bool) -> None:
        self._folder, self._devices, self._shared = folder, devices, shared
        self._held = contextlib.ExitStack()
        self._wish: Wish | None = None
        self._lease: Lease | None = None

    def take(self, wish: Wish) -> Lease:
        """Wait for the devices of this wish, and hold them. Raises `LeaseError`."""
        if self._lease is None or self._wish != wish:
            self.give_back()
            asked = hold(self._folder, self._devices, wish.count, alone=wish.alone, shared=self._shared)
            self._lease, self._wish = self._held.enter_context(asked), wish
        return self._lease

    def give_back(self) -> None:
        """Free the devices, if any are held."""
        self._lease = self._wish = None
        self._held.close()


def _take(
    held: contextlib.ExitStack, folder: Path, devices: Sequence[Device], count: int, deadline: float
) -> tuple[Device, ...]:
    taken: dict[int, Device] = {}
    while len(taken) < count:
        for device in devices:
            if len(taken) == count or device.index in taken:
                continue
            descriptor = _try_lock(folder / f"device-{device_key(device)}.lock", fcntl.LOCK_EX)
            if descriptor is not None:
                held.callback(os.close, descriptor)
                taken[device.index] = device
        if len(taken) < count:
            _wait(deadline, f"{count} of {len(devices)} devices in {folder}")
    return tuple(taken[index] for index in sorted(taken))


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
