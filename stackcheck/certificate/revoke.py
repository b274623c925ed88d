"""Revoke a certificate: sign a FAILED verdict, then move floating tags back to the last certified image.

In: a reference, a reason, the signing key. Out: `Revoked`: the digest and what happened to its tags. The
verdict comes first: from then on verification fails, whatever happens to the tags. The image stays.
A registry has no transaction: another host may publish between the look and the move of a tag, so each move
is looked at again.
"""

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass, field

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import admit
from stackcheck.certificate.predicates import revocation
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import VSA, Envelope, Statement, facts, newest, sign, status
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import Manifest, MissingError
from stackcheck.oci.store import Store, parse_reference
from stackcheck.oci.stores import open_store
from stackcheck.oci.tags import all_floating, all_unique, digest_of

LOOKS = 10  # another host may publish at each of them


@dataclass(kw_only=True)
class Moves:
    """What happened to the floating tags that named an image; `moved` has the digests that they name now.

    Those in `removed` were deleted, because no other image of the stack is certified; those in `left` still
    name the image, because the store cannot delete tags.
    """

    moved: dict[str, str] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Revoked:
    """What a revocation did.

    Attributes:
        removed: Floating tags that were deleted, because no earlier image of the stack is certified.
    """

    digest: str  # the manifest whose certificate was revoked
    moved: dict[str, str]  # floating tags that were moved back, each with the digest that it names now
    removed: tuple[str, ...]
    left: tuple[str, ...]  # floating tags that still name `digest`, because the store cannot delete tags


def revoke(
    reference: str,
    *,
    reason: str,
    key: Signer,
    now: dt.datetime,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Revoked:
    """Revoke the certificate of an image in a store. A second call with the same reason finishes the first.

    The reason is signed, and `verify` shows it.

    Raises:
        CertificateError: This key signed no certificate for the image.
    """
    found = parse_reference(reference)
    store = open_store(found.target, plain_http=plain_http)
    public_key = key.public_key()
    store.read_manifest(found.name)  # before `writing`, which would create a missing layout
    with store.writing(report), store.tidied():
        manifest = store.read_manifest(found.name)
        known = attachments.read_envelopes(store, manifest.digest, public_key)
        latest = newest(envelope.statement for envelope in known)
        if latest is None:
            raise CertificateError(
                "there is no certificate of this key to revoke",
                where=reference,
                got=f"{len(known)} statements of this key, no verification summary",
                expected="a certificate that this key signed",
                next_step="name the key that signed it: --key PATH",
            )
        # Nothing new to sign if a call that was interrupted did it: repair the forms, and move the tags.
        failed: tuple[Envelope, ...] = ()
        if not _is_revoked(latest, reason):
            statements = [item.statement for item in known if item.statement.predicate_type == VSA]
            ended = [item for item in statements if status(item) == "PASSED"] or [latest]
            failed = (sign(revocation(latest, ended, reason=reason, now=now), key),)
        attachments.attach(store, manifest, failed, public_key)
        report(f"revoked {store.target}@{manifest.digest}")
        moves = move_back(store, manifest.digest, public_key)
        # Last: a publisher elsewhere, who had read these tags before, may have written them meanwhile.
        attachments.attach(store, manifest, failed, public_key)
    return Revoked(
        digest=manifest.digest, moved=moves.moved, removed=tuple(moves.removed), left=tuple(moves.left)
    )


def _is_revoked(latest: Statement, reason: str) -> bool:
    """Whether the newest verdict is already this revocation."""
    return status(latest) == "FAILED" and facts(latest).get("reasons") == [reason]


def move_back(store: Store, digest: str, public_key: Pinned) -> Moves:
    """Move every floating tag that names the image to the newest certified image of its stack.

    A tag that was moved is moved again if a newer release appeared meanwhile: the move may have undone it.
    """
    done = Moves()
    for _ in range(LOOKS):
        names = [tag for tag in all_floating(store) if tag not in done.left]
        moved = [_move(store, tag, digest, public_key, done) for tag in names]
        if not any(moved):
            break
    return done


def _move(store: Store, tag: str, digest: str, public_key: Pinned, done: Moves) -> bool:
    """Move one tag where it names the image, or names what we moved it to and a newer image is certified."""
    named = digest_of(store, tag)
    if named is None or named not in {digest, done.moved.get(tag)}:
        return False
    best = _newest_certified(store, tag, public_key)
    if best is not None and best.digest != named:
        store.write_manifest(best, tag)
        done.moved[tag] = best.digest
        return True
    if best is None and named == digest:
        (done.removed if store.delete_tag(tag) else done.left).append(tag)
        return True
    return False


def _newest_certified(store: Store, tag: str, public_key: Pinned) -> Manifest | None:
    """The newest image of a floating tag whose certificate is still valid."""
    for name in reversed(all_unique(store, tag)):
        try:
            manifest = store.read_manifest(name)
            admit(manifest, attachments.read_envelopes(store, manifest.digest, public_key))
        except (PublishError, CertificateError, MissingError):
            continue  # not certified, malformed or gone; a store that fails now says nothing of the image
        return manifest
    return None
