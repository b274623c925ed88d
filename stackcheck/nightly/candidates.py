"""Which published images are due for a run on this host, and why each of the others is not.

In: a publish target, the pinned key, this host, the last night. Out: an `Item` or a `NotRun` for each
floating tag: nothing is left out without a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stackcheck.certificate import attachments
from stackcheck.certificate.policy import age_text
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
from stackcheck.errors import StackcheckError
from stackcheck.nightly import floor
from stackcheck.nightly.decide import standing
from stackcheck.nightly.state import Figure, Item, NotRun
from stackcheck.oci import tags
from stackcheck.oci.documents import is_attachment
from stackcheck.oci.stores import open_store

if TYPE_CHECKING:
    import datetime as dt
    from collections.abc import Iterator, Mapping, Sequence

    from stackcheck.certificate.keyring import Pinned
    from stackcheck.nightly.fingerprint import Fingerprint
    from stackcheck.nightly.state import LastNight
    from stackcheck.oci.store import Store


@dataclass(frozen=True, kw_only=True)
class PublishedTag:
    """A floating tag of a target, and what the pinned key says about the image that it names.

    Attributes:
        statements: What the key signed; empty if it signed nothing.
        problem: Why the image cannot be read; None if it can.
    """

    tag: str
    reference: str
    digest: str
    statements: tuple[Statement, ...] = ()
    problem: StackcheckError | None = None


@dataclass(frozen=True, kw_only=True)
class Tonight:
    """What decides which images are due.

    Attributes:
        here: This host.
        last: The last night on this host; None if there was none.
        changes: What changed on this host since then.
        renew_after: The age at which a certificate is renewed.
        now: The time of this night.
        force: Whether everything that is certified for hosts like this one is due.
    """

    here: Fingerprint
    last: LastNight | None
    changes: tuple[str, ...]
    renew_after: dt.timedelta
    now: dt.datetime
    force: bool = False


def published(target: str, public_key: Pinned, *, plain_http: bool = False) -> Iterator[PublishedTag]:
    """Every floating tag of a target."""
    store = open_store(target, plain_http=plain_http)
    for tag in sorted(store.tags()):
        if not (tags.is_unique(tag) or is_attachment(tag)):
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
