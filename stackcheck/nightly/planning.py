"""The plan of a night. In: this host, the publish target, matrix.yaml, the last night. Out: a `Plan`.

Planning reads and pulls; it changes no certificate and no tag.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from stackcheck import vendors
from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import age_text
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import (
    VSA,
    Statement,
    facts,
    lifts,
    name_of,
    newest,
    revocations,
    status,
    time_verified,
)
from stackcheck.engine.client import Engine
from stackcheck.errors import EngineError, StackcheckError
from stackcheck.history.metrics import node_id
from stackcheck.matrix import matrix
from stackcheck.matrix.matrix import Foreign
from stackcheck.nightly import fingerprint, floor
from stackcheck.nightly.decide import standing
from stackcheck.nightly.fingerprint import Fingerprint
from stackcheck.nightly.state import Ended, Figure, Item, LastNight, NotRun, Plan
from stackcheck.oci import tags
from stackcheck.oci.store import Store
from stackcheck.oci.stores import open_store
from stackcheck.oci.tags import label
from stackcheck.vendors import Vendor
from stackcheck.vendors.kernel_module import DriverModule

if TYPE_CHECKING:
    from stackcheck.flow import FlowSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class NightSettings:
    """What a user can choose.

    Attributes:
        force: Run everything that is certified for hosts like this one, also while a reboot is pending.
    """

    flow: FlowSettings  # the checkout, the publish target, how it is reached
    key: Signer  # the key that signed the certificates; it signs the new ones
    vendor: Vendor | None = None  # the vendor whose devices count; None: what `vendors.detect` finds
    select: tuple[str, ...] = ()  # patterns on tags; empty: all
    force: bool = False
    clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC)


def read_host(settings: NightSettings) -> tuple[Fingerprint, DriverModule | None]:
    """This host's fingerprint, and the state of its driver's module."""
    host = vendors.host(settings.vendor)
    module = vendors.driver_module(host.vendor)
    return fingerprint.of_host(host, module), module


def make(settings: NightSettings, last: LastNight | None, engine: Engine | None) -> Plan:
    """Plan a night. Without an engine, as in a dry run, images from elsewhere are listed and not pulled."""
    here, module = read_host(settings)
    chosen = matrix.load_matrix(settings.flow.root / "matrix.yaml")
    images = tuple(
        published(settings.flow.target, settings.key.public_key(), plain_http=settings.flow.plain_http)
    )
    tonight = Tonight(
        here=here,
        last=last,
        changes=fingerprint.changes(last.fingerprint, here) if last else (),
        renew_after=chosen.policy.renew_after,
        now=settings.clock(),
        force=settings.force,
    )
    steps = [*(_step(image, tonight) for image in images), *_foreign(chosen.foreign, images, tonight, engine)]
    pending = _pending(module) if not settings.force else None
    items = tuple(item for item in steps if isinstance(item, Item))
    chosen_by = settings.select or ("*",)
    kept = tuple(
        item for item in items if not pending and any(fnmatchcase(item.tag, each) for each in chosen_by)
    )
    return Plan(
        night=secrets.token_hex(6),
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
    return assess(image, tonight)


def _foreign(
    entries: Sequence[Foreign], images: Sequence[PublishedTag], tonight: Tonight, engine: Engine | None
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


@dataclass(frozen=True, kw_only=True)
class PublishedTag:
    """A floating tag of a target, and what the pinned key says about the image that it names."""

    tag: str
    reference: str
    digest: str
    statements: tuple[Statement, ...] = ()  # what the key signed; empty if it signed nothing
    problem: StackcheckError | None = None  # why the image cannot be read; None if it can


@dataclass(frozen=True, kw_only=True)
class Tonight:
    """What decides which images are due."""

    here: Fingerprint
    last: LastNight | None  # the last night on this host; None if there was none
    changes: tuple[str, ...]  # what changed on this host since then
    renew_after: dt.timedelta  # the age at which a certificate is renewed
    now: dt.datetime
    force: bool = False  # whether everything that is certified for hosts like this one is due


def published(target: str, public_key: Pinned, *, plain_http: bool = False) -> Iterator[PublishedTag]:
    """Every floating tag of a target."""
    store = open_store(target, plain_http=plain_http)
    for tag in sorted(tags.all_floating(store)):
        yield _read(store, tag, public_key)


def _read(store: Store, tag: str, public_key: Pinned) -> PublishedTag:
    name = f"{store.target}:{tag}"
    try:
        digest = store.read_manifest(tag).digest
        envelopes = attachments.read_envelopes(store, digest, public_key)
    except StackcheckError as error:  # one damaged image does not hide the others
        return PublishedTag(tag=tag, reference=name, digest="", problem=error)
    statements = tuple(envelope.statement for envelope in envelopes)
    return PublishedTag(tag=tag, reference=f"{store.target}@{digest}", digest=digest, statements=statements)


def assess(image: PublishedTag, tonight: Tonight) -> Item | NotRun:
    """Whether an image that could be read is due tonight on this host, and why. Pure."""
    latest = newest(image.statements)
    if latest is None:
        return NotRun(tag=image.tag, why="the pinned key signed no certificate for it")
    name = name_of(latest)
    if not tags.names(image.tag, name, facts(latest)["stackId"]):
        owner = name or "an image without a stack"
        return NotRun(tag=image.tag, why=f"the tag names an image of {owner}, and `verify` refuses it")
    if status(latest) != "PASSED":
        return NotRun(tag=image.tag, why=f"revoked: {'; '.join(facts(latest).get('reasons', ()))}")
    mine = [item for item in _valid(image.statements) if _is_for(facts(item)["host"], tonight.here)]
    if not mine:
        return NotRun(tag=image.tag, why=f"certified for {_machines(image.statements)}, not for this host")
    standing_, changes, index = standing([facts(item)["host"] for item in mine], tonight.here.model_dump())
    nearest = facts(mine[index])
    found = Item(
        tag=image.tag,
        reference=image.reference,
        digest=image.digest,
        standing=standing_,
        changes=changes,
        passed=tuple(sorted(nearest.get("passed", ()))),
        suites=nearest.get("inputs", {}).get("suites", ""),
        stack_id=nearest["stackId"],
        config_digest=nearest["configDigest"],
        python=nearest.get("python"),
        figures=tuple(Figure(**each) for each in floor.figures(nearest)),
    )
    age = tonight.now - time_verified(mine[index])
    reasons = tuple(_reasons(found, age, tonight))
    if reasons:
        return found.model_copy(update={"reasons": reasons})
    why = f"not due: nothing changed here, and its certificate is {age_text(age)} old"
    return NotRun(tag=image.tag, why=why, for_here=True)


def _valid(statements: Sequence[Statement]) -> list[Statement]:
    """The PASSED summaries that no revocation has ended, the newest first; one that is too old counts too."""
    revoked = revocations(statements)
    passed = [item for item in statements if item.predicate_type == VSA and status(item) == "PASSED"]
    return sorted((item for item in passed if lifts(item, revoked)), key=time_verified, reverse=True)


def _is_for(host: Mapping[str, Any], here: Fingerprint) -> bool:
    """Whether a certificate is about the same number of devices of the same model."""
    certified = sorted(device["model"] for device in host["devices"])
    return host["vendor"] == here.vendor and certified == sorted(device.model for device in here.devices)


def _reasons(found: Item, age: dt.timedelta, tonight: Tonight) -> Iterator[str]:
    last = tonight.last
    if last is None:
        yield "the first night on this host"
    yield from tonight.changes
    if found.standing == "new driver":
        yield f"not certified for this driver: {' and '.join(found.changes)}"
    if age > tonight.renew_after:
        yield f"its certificate is {age_text(age)} old"
    if last and found.digest in last.unsettled:
        yield f"the last night did not settle it: {last.unsettled[found.digest]}"
    if tonight.force:
        yield "forced"


def _machines(statements: Sequence[Statement]) -> str:
    hosts = [facts(item)["host"] for item in statements if item.predicate_type == VSA]
    names = {
        f"{' + '.join(sorted({device['model'] for device in host['devices']}))} x{len(host['devices'])}"
        for host in hosts
    }
    return " or ".join(sorted(names))
