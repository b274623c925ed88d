"""What readings mean for a check. In: a `Reading`. Out: its value, a skip with its reason, or a failure."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeGuard

import pytest

from harness import skips
from harness.monitor import Monitor, MonitorError
from harness.unfit import InvalidRun, Kind, Unfit, invalid
from vendors import Absence, Device, Host, Link, Reading, VendorAbsentError, is_known

PAIR = 2
FAST_LINKS = frozenset({"nvlink", "xgmi"})


def only_with(condition: object, feature: str, reason: str) -> None:
    """Skip the check unless this device model has the feature; `harness.skips` lists the features."""
    if not condition:
        skips.without_feature(feature, reason)


def needs_backend(backend: str, present: Sequence[str]) -> None:
    """Skip the check unless this architecture has the backend of attention."""
    only_with(backend in present, f"attention: {backend}", f"this architecture has no {backend} attention")


def needs_pair(count: int) -> None:
    """Skip the check on one device, which has no pair."""
    if count < PAIR:
        skips.without_devices(PAIR, count)


def known(reading: Reading, what: str) -> int | float | str | bool:
    """The value. Without one the check fails if the device did not answer, and is skipped otherwise."""
    if isinstance(reading, Absence):
        if reading.is_failure:
            pytest.fail(_unanswered(reading, what), pytrace=False)
        skips.unreadable(what, f"{what}: {reading}")
    return reading


class Findings:
    """Collects the problems of all devices before the check ends, so that no skip hides a failure."""

    def __init__(self) -> None:
        self.wrong: list[str] = []
        self.unfit: list[Unfit] = []
        self.unread: list[tuple[str, str]] = []  # reading, reason

    def knows(self, reading: Reading, what: str) -> TypeGuard[int | float | str | bool]:
        """Whether there is a value to judge; its absence is kept as a failure or as a reason to skip."""
        if isinstance(reading, Absence):
            if reading.is_failure:
                self.wrong.append(_unanswered(reading, what))
            else:
                self.unread.append((what, f"{what}: {reading}"))
        return is_known(reading)

    def machine(self, kind: Kind, words: str, device: int | None = None) -> None:
        """Keep a fault of the machine, which says nothing about the image."""
        self.unfit.append(Unfit(kind, words, device))

    def conclude(self) -> None:
        """Fail if anything is wrong.
        Else end as invalid if the machine is unfit, else skip if anything is unread, else return.
        """
        if self.wrong:
            pytest.fail("\n".join((*self.wrong, *(found.words for found in self.unfit))), pytrace=False)
        if self.unfit:
            invalid(self.unfit)
        if self.unread:
            skips.unreadable(*self.unread[0])


def is_unread(reading: Reading) -> bool:
    """Whether there is no value and that is no fault. All ones and errors of the library are faults."""
    return isinstance(reading, Absence) and not reading.is_failure


def differs(reading: Reading, expected: object) -> bool:
    """Whether the reading differs from the expected value, or is an error."""
    return not is_unread(reading) and reading != expected


def of(host: Host, device: Device) -> Device:
    """The same device in another reading of the machine."""
    return next(candidate for candidate in host.devices if candidate.uuid == device.uuid)


def _unanswered(absence: Absence, what: str) -> str:
    return f"{what}: {absence}, so " + (
        "the device did not answer" if absence == Absence.ALL_ONES else "its state is unknown"
    )


def machine(reading: Callable[[], Host], *, attempts: int = 2) -> Host:
    """Read the machine during the run. If the library fails, it is asked once more.

    If it fails again the check is invalid: nothing is known about the machine, nor about the image.
    """
    for _ in range(attempts - 1):
        with contextlib.suppress(MonitorError, VendorAbsentError):
            return reading()
    try:
        return reading()
    except (MonitorError, VendorAbsentError) as error:
        words = f"the library does not report the machine's state: {error}"
        raise InvalidRun((Unfit("no answer", words),)) from None


def while_busy(monitor: Monitor, work: Callable[[], object]) -> list[Host]:
    """Readings taken while `work` ran; at least one."""
    readings: list[Host] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again below, in the check's thread
            failure.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        while thread.is_alive() or not readings:
            readings.append(machine(monitor.read_devices))
            thread.join(0.1)
    finally:
        thread.join()
    if failure:
        raise failure[0]
    return readings


def linked_pairs(host: Host, devices: Sequence[Device]) -> set[tuple[int, int]]:
    """The ordered pairs that a link joins, by their places in `devices`; others go through the host."""
    return {pair for pair, link in _pairs(host, devices) if link.kind in FAST_LINKS}


def links_of_pairs(host: Host, devices: Sequence[Device]) -> dict[tuple[int, int], int]:
    """How many links join each ordered pair of devices, by their places in `devices`; without what is unread.

    Torch and torchrun number the devices of a run by these places.
    """
    return {pair: link.links for pair, link in _pairs(host, devices) if isinstance(link.links, int)}


def _pairs(host: Host, devices: Sequence[Device]) -> Iterator[tuple[tuple[int, int], Link]]:
    place = {device.index: number for number, device in enumerate(devices)}
    for link in host.links:
        if link.a in place and link.b in place:
            a, b = place[link.a], place[link.b]
            yield from (((a, b), link), ((b, a), link))
