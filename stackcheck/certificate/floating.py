"""Move floating tags away from an image that is not certified, back to the newest one that is.

In: a store, the digest of the image. Out: which tags moved, were deleted, or still name it. A registry has no
transaction: another host may publish between the look and the move, so each move is looked at again.
"""

from dataclasses import dataclass, field

from stackcheck.certificate import attachments
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.policy import admit
from stackcheck.errors import CertificateError, PublishError
from stackcheck.oci.documents import Manifest, MissingError
from stackcheck.oci.store import Store
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
