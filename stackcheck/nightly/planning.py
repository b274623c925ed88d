"""The plan of a night. In: this host, the publish target, matrix.yaml, the last night. Out: a `Plan`.

Planning reads and pulls; it changes no certificate and no tag.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import os
import secrets
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from stackcheck import vendors
from stackcheck.certificate.statement import facts, newest
from stackcheck.errors import EngineError
from stackcheck.history.metrics import node_id
from stackcheck.matrix import matrix
from stackcheck.nightly import candidates, fingerprint
from stackcheck.nightly.candidates import PublishedTag, Tonight
from stackcheck.nightly.state import Ended, Item, NotRun, Plan
from stackcheck.oci.tags import label

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stackcheck.certificate.signers import Signer
    from stackcheck.engine.client import Engine
    from stackcheck.flow import FlowSettings
    from stackcheck.matrix.matrix import Foreign
    from stackcheck.nightly.fingerprint import Fingerprint
    from stackcheck.nightly.state import LastNight
    from stackcheck.vendors import Vendor
    from stackcheck.vendors.kernel_module import DriverModule


def _utc_now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NightSettings:
    """What a user can choose.

    Attributes:
        flow: The checkout, the publish target, how it is reached.
        key: The key that signed the certificates; it signs the new ones.
        vendor: The vendor whose devices count; None: what `vendors.detect` finds.
        select: Patterns on tags; empty: all.
        force: Run everything that is certified for hosts like this one, also while a reboot is pending.
        clock: The time.
    """

    flow: FlowSettings
    key: Signer
    vendor: Vendor | None = None
    select: tuple[str, ...] = ()
    force: bool = False
    clock: Callable[[], dt.datetime] = _utc_now


def read_host(settings: NightSettings) -> tuple[Fingerprint, DriverModule | None]:
    """This host's fingerprint, and the state of its driver's module."""
    host = vendors.host(settings.vendor)
    module = vendors.driver_module(host.vendor)
    return fingerprint.of_host(host, module), module


def make(settings: NightSettings, last: LastNight | None, engine: Engine | None) -> Plan:
    """Plan a night.

    Args:
        settings: What the user chose.
        last: The last night on this host.
        engine: Pulls the images that were not built here, to see whether they are new; None, for a dry run:
            they are listed and not pulled.
    """
    here, module = read_host(settings)
    chosen = matrix.load(settings.flow.root / "matrix.yaml")
    images = tuple(
        candidates.published(
            settings.flow.target, settings.key.public_key(), plain_http=settings.flow.plain_http
        )
    )
    tonight = Tonight(
        here=here,
        last=last,
        changes=fingerprint.changes(last.fingerprint, here) if last else (),
        renew_after=chosen.policy.renew_after,
        now=settings.clock(),
        force=settings.force,
    )
    steps = [
        *(_step(image, tonight) for image in images),
        *_foreign(chosen.foreign, images, tonight, engine),
    ]
    pending = _pending(module) if not settings.force else None
    items = tuple(item for item in steps if isinstance(item, Item))
    kept = () if pending else tuple(item for item in items if _is_selected(item.tag, settings.select))
    return Plan(
        night=secrets.token_hex(6),
        pid=os.getpid(),
        started=tonight.now,
        target=settings.flow.target,
        node=node_id(device.id for device in here.devices),
        fingerprint=here,
        changes=tonight.changes,
        notes=tuple(_notes(module, settings)),
        revoke_nodes=chosen.policy.revoke_nodes,
        reboot_pending=pending,
        items=kept,
        skipped=(
            *(item for item in steps if isinstance(item, NotRun)),
            *(_postponed(item, pending) for item in items if item not in kept),
        ),
        foreign=last.foreign if last else {},
    )


def _step(image: PublishedTag, tonight: Tonight) -> Item | NotRun:
    if image.problem:
        because = f"{image.problem.what}: {image.problem.got or image.problem.where}"
        ended = Ended(action="error", because=because, exit_code=image.problem.exit_code)
        return Item(tag=image.tag, reference=image.reference, ended=ended)
    return candidates.assess(image, tonight)


def _foreign(
    entries: Sequence[Foreign],
    images: Sequence[PublishedTag],
    tonight: Tonight,
    engine: Engine | None,
) -> Iterator[Item | NotRun]:
    """The images of `foreign:` whose present bytes were never certified; `images` has those that were."""
    tagged = {image.tag: image for image in images}
    here, known = tonight.here, tonight.last.foreign if tonight.last else {}
    for entry in entries:
        tag = label(entry.reference)
        if (entry.vendor, entry.device) != (here.vendor, here.device_model):
            yield NotRun(tag=tag, why=f"{entry.reference} is for {entry.vendor} {entry.device}")
        elif engine is None:
            yield NotRun(tag=tag, why=f"{entry.reference} is pulled first, to see whether it is new")
        else:
            yield from _pulled(entry, tag, tagged.get(tag), known, engine)


def _pulled(
    entry: Foreign, tag: str, image: PublishedTag | None, known: Mapping[str, str], engine: Engine
) -> Iterator[Item]:
    try:
        engine.pull(entry.reference)
        found = engine.inspect(entry.reference).id
    except EngineError as error:
        ended = Ended(action="error", because=f"{error.what}: {error.got}", exit_code=error.exit_code)
        yield Item(tag=tag, reference=entry.reference, ended=ended)
        return
    latest = newest(image.statements) if image else None
    certified = {image.digest, facts(latest)["configDigest"]} if image and latest else set()
    if found in certified or known.get(entry.reference) == found:
        return
    why = "its tag names a new image" if latest else "no certificate yet (foreign: in matrix.yaml)"
    yield Item(
        tag=tag,
        reference=entry.reference,
        image_id=found,
        accept_python=entry.accept_python,
        reasons=(why,),
        standing="new image",
    )


def _is_selected(tag: str, select: Sequence[str]) -> bool:
    return not select or any(fnmatchcase(tag, pattern) for pattern in select)


def _postponed(item: Item, pending: str | None) -> NotRun:
    why = "a reboot is pending" if pending else "not selected"
    return NotRun(
        tag=item.tag, why=f"{why}; due: {'; '.join(item.reasons)}", for_here=True, postponed=item.key
    )


def _pending(module: DriverModule | None) -> str | None:
    if module is None or not module.reboot_pending:
        return None
    return f"{module.name}: {module.loaded} runs, {module.installed} is installed"


def _notes(module: DriverModule | None, settings: NightSettings) -> Iterator[str]:
    if module is None:
        return
    if module.loaded is None:
        yield f"the kernel module {module.name} is not loaded"
    if module.unknown:
        yield f"whether a reboot is pending is not known: {module.unknown}"
    pending = _pending(module)
    if settings.force and pending:
        yield f"a reboot is pending, and this night is about the old driver: {pending}"
