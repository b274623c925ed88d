"""Who may use which device: file locks, one per physical device. In: a wish. Out: a held `Lease`.

The directory may be shared between containers: locks are flocks, so a killed holder leaves nothing behind.
A turnstile makes waiting fair: whoever waits holds it, so that eight devices are not starved by checks that
want one; a `Keeper` holds on to a lease that the next check wants too. Correctness holds the machine's lock
shared and performance holds it alone.
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
    """Devices that are ours until the context ends, in index order."""

    devices: tuple[Device, ...]
    alone: bool


def default_folder() -> Path:
    """Where locks live when nobody says: one place per machine, for all users and containers."""
    return Path("/tmp/stackcheck-leases")


def device_key(device: Device) -> str:
    """The lock's name: UUID and bus address, which survive renumbering and both kinds of visibility."""
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
    """Hold `count` of the devices; nobody locks `shared` ones (a CPU). Raises `LeaseError` after `wait_s`."""
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
    """What a check asks for; `group` keeps checks apart that are not to share a lease."""

    group: str
    count: int
    alone: bool


class Keeper:
    """The one lease of this process, kept while the next check has the same wish.

    Checks of a file share launches and a worker; between two of them nobody else may slip in, or each would
    wait for all devices anew.
    """

    def __init__(self, folder: Path, devices: Sequence[Device], *, shared: bool) -> None:
        self._folder, self._devices, self._shared = folder, devices, shared
        self._held = contextlib.ExitStack()
        self._wish: Wish | None = None
        self._lease: Lease | None = None

    def take(self, wish: Wish) -> Lease:
        """The devices of this wish; waits for them. Raises `LeaseError`."""
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
        folder.chmod(0o1777)  # for every uid; mkdir's mode is narrowed by the umask
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            raise LeaseError(f"{folder}: not a folder of locks; name another with --lease-dir") from None
    except OSError as error:
        raise LeaseError(f"{folder}: {error.strerror}; name a writable folder with --lease-dir") from error


def _opened(path: Path) -> int:
    """Open a lock file for all: uids in a container and on its host differ, and a umask narrows the mode.

    One that is there is opened without O_CREAT, which Linux refuses in a sticky folder for another's file.
    """
    with contextlib.suppress(FileNotFoundError):
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # made by another process since
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    os.fchmod(descriptor, 0o666)
    return descriptor


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise LeaseError(f"{what} was not free in time: another run holds it (see `fuser` on the lock file)")
    time.sleep(POLL_S)
