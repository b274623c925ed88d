"""Where each stack stands on each machine. In: runs and published images. Out: cells and machines. Pure.

A machine is a device model with a driver. A cell is one stack on one machine: what its certificate says, and
what its newest run says, which may be newer than the certificate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterable, Mapping, Sequence

    from stackcheck.history.runs import Run
    from stackcheck.report.published import CertifiedFor, PublishedImage

State = Literal["certified", "passed", "failed", "unfit", "expired", "revoked"]
WORDS: Mapping[State, str] = {
    "certified": "certified",
    "passed": "passed, not certified",
    "failed": "failed",
    "unfit": "machine unfit",
    "expired": "certificate expired",
    "revoked": "revoked",
}


@dataclass(frozen=True, kw_only=True, order=True)
class StandingMachine:
    """What a certificate is for: a device model and its driver; an empty driver stands for none."""

    device_model: str
    driver: str

    def words(self) -> str:
        """The device model and driver in words."""
        return f"{self.device_model}, {f'driver {self.driver}' if self.driver else 'no driver'}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A published image and what it is certified for on one machine."""

    image: PublishedImage
    machine: CertifiedFor

    def valid(self, now: dt.datetime) -> bool:
        """Whether `stackcheck verify` would accept it now."""
        return self.image.standing == "certified" and self.machine.expires > now


@dataclass(frozen=True, kw_only=True)
class StandingCell:
    """One stack on one machine; a run that failed after the certificate was signed hides the certificate."""

    stack: str
    machine: StandingMachine
    state: State
    newest: Run | None
    runs: int
    offer: Offer | None

    @property
    def simulated(self) -> bool:
        """Whether the newest run is simulated: no host ran it."""
        return self.newest is not None and self.newest.simulated


def machine_of(run: Run) -> StandingMachine:
    """The machine of a run."""
    return StandingMachine(device_model=run.device_model, driver=run.driver or "")


def offers(images: Iterable[PublishedImage], machine: StandingMachine) -> tuple[Offer, ...]:
    """The images that are or were certified for a machine: of most devices first, the newest first."""
    found = [
        Offer(image=image, machine=each)
        for image in images
        for each in image.machines
        if (each.device_model, each.driver or "") == (machine.device_model, machine.driver)
    ]
    return tuple(sorted(found, key=lambda offer: (offer.image.stack, -offer.machine.verified.timestamp())))


def machines(runs: Iterable[Run], images: Iterable[PublishedImage]) -> tuple[StandingMachine, ...]:
    """Every machine that a run or a certificate names, in order."""
    certified = {
        StandingMachine(device_model=each.device_model, driver=each.driver or "")
        for image in images
        for each in image.machines
    }
    return tuple(sorted(certified | {machine_of(run) for run in runs}))


def cells(
    runs: Sequence[Run], images: Sequence[PublishedImage], now: dt.datetime
) -> tuple[StandingCell, ...]:
    """Every stack on every machine on which it ran or is certified; runs come oldest first."""
    ran: dict[tuple[str, StandingMachine], list[Run]] = {}
    for run in runs:
        ran.setdefault((run.stack, machine_of(run)), []).append(run)
    offered = {
        (offer.image.stack, machine): offer
        for machine in machines((), images)
        for offer in reversed(offers(images, machine))
        if offer.image.current
    }
    return tuple(
        _cell(key, ran.get(key, []), offered.get(key), images, now) for key in sorted({*ran, *offered})
    )


def _cell(
    key: tuple[str, StandingMachine],
    runs: Sequence[Run],
    offer: Offer | None,
    images: Iterable[PublishedImage],
    now: dt.datetime,
) -> StandingCell:
    stack, machine = key
    newest = runs[-1] if runs else None
    valid = offer is not None and offer.valid(now)
    return StandingCell(
        stack=stack,
        machine=machine,
        state=_state(newest, offer, now, revoked=_revoked(stack, machine, newest, images)),
        newest=newest,
        runs=len(runs),
        offer=offer if valid else None,
    )


def _state(newest: Run | None, offer: Offer | None, now: dt.datetime, *, revoked: bool) -> State:
    after = newest is not None and (offer is None or newest.finished > offer.machine.verified)
    if newest is not None and newest.status == "FAILED" and after:
        return "revoked" if revoked else "failed"
    if offer is not None and offer.valid(now):
        return "certified"
    if revoked:
        return "revoked"
    if offer is not None:
        return "expired"
    assert newest is not None
    states: dict[str, State] = {"PASSED": "passed", "FAILED": "failed", "UNFIT": "unfit"}
    return states[newest.status]


def _revoked(
    stack: str, machine: StandingMachine, newest: Run | None, images: Iterable[PublishedImage]
) -> bool:
    """Whether all that was certified there was revoked, or the image of the newest run was."""
    mine = [offer.image for offer in offers(images, machine) if offer.image.stack == stack]
    revoked = {image.digest for image in mine if image.standing == "revoked"}
    ran = newest.image if newest else None
    return ran in revoked or (bool(mine) and all(image.standing == "revoked" for image in mine))


def warnings(found: Iterable[StandingCell]) -> tuple[str, ...]:
    """The drivers not to roll out: the newest run failed on it, and another driver is certified."""
    by_place: dict[tuple[str, str], list[StandingCell]] = {}
    for cell in found:
        by_place.setdefault((cell.stack, cell.machine.device_model), []).append(cell)
    lines = []
    for (stack, model), group in sorted(by_place.items()):
        certified = [cell.machine.driver for cell in group if cell.state == "certified"]
        lines += [_warning(stack, model, cell, certified) for cell in group if certified and _unproven(cell)]
    return tuple(lines)


def _unproven(cell: StandingCell) -> bool:
    return cell.state == "failed" and cell.newest is not None and cell.offer is None


def _warning(stack: str, model: str, cell: StandingCell, certified: Sequence[str]) -> str:
    mark = " (simulated)" if cell.simulated else ""
    return (
        f"Do not roll out driver {cell.machine.driver or 'none'} on {model}: {stack} failed on it"
        f"{mark} and is certified with {', '.join(certified)}."
    )
