"""The tags of a store: a floating one per stack, which moves, and unique ones, which stay with their digest.

In: a store, a tag, a name. Out: the unique tags of a floating one, the digest of a tag, the stack that a tag
belongs to, and the tag for a name.
"""

import datetime as dt
import hashlib
import re

from stackcheck.oci.documents import MissingError, is_attachment
from stackcheck.oci.store import Store

# No tag matches both: a foreign image's ending begins with a letter, a unique tag's with a digit.
_UNIQUE = re.compile(r"(?P<tag>.+)-(?P<date>\d{8})-(?P<number>\d+)(\.[0-9a-f]{8})?")
_FOREIGN = re.compile(r".+-x[0-9a-f]{8}")


def label(name: str) -> str:
    """A name for files and tags: a stack id unchanged, a reference without what a tag cannot have.

    A reference also gets a hash as its ending: two references never share a name, nor one with a stack.
    """
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name)
    return plain if plain == name else f"{plain[:90]}-x{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def floating(tag: str) -> str:
    """The floating tag of a unique one; any other tag unchanged."""
    found = _UNIQUE.fullmatch(tag)
    return found["tag"] if found else tag


def names(tag: str, name: str | None, stack_id: str | None) -> bool:
    """Whether an image that was certified under a name, of a stack (None: without a stack), may have a tag.

    Images without a stack have tags with an ending of their own, so that they never replace a stack's image.
    """
    if name is None or floating(tag) != name:
        return False
    return stack_id is not None or _FOREIGN.fullmatch(name) is not None


def unique(store: Store, tag: str, digest: str) -> str:
    """The tag that stays: the one this digest has, or `<tag>-<UTC date>-<n>.<digest>` with the next free n.

    With the digest's first digits in it, two hosts that choose at the same moment do not choose the same.
    """
    mine = all_unique(store, tag)
    kept = next((name for name in reversed(mine) if digest_of(store, name) == digest), None)
    today = f"{tag}-{dt.datetime.now(dt.UTC):%Y%m%d}-"
    numbers = (int(name.removeprefix(today).partition(".")[0]) for name in mine if name.startswith(today))
    return kept or f"{today}{max(numbers, default=0) + 1}.{digest.removeprefix('sha256:')[:8]}"


def all_unique(store: Store, tag: str) -> list[str]:
    """The unique tags of a floating tag, oldest first."""
    matches = [_UNIQUE.fullmatch(name) for name in store.tags()]
    mine = [match for match in matches if match and match["tag"] == tag]
    return [match.string for match in sorted(mine, key=lambda match: (match["date"], int(match["number"])))]


def is_unique(tag: str) -> bool:
    """Whether a tag is one that stays."""
    return _UNIQUE.fullmatch(tag) is not None


def all_floating(store: Store) -> list[str]:
    """The tags of images that move."""
    return [tag for tag in store.tags() if not (is_unique(tag) or is_attachment(tag))]


def digest_of(store: Store, tag: str) -> str | None:
    """The digest that a tag names; None when there is no such tag."""
    try:
        return store.read_manifest(tag).digest
    except MissingError:  # removed since the tags were listed
        return None


def local_name(stack_id: str | None, config_digest: str) -> str:
    """The name of an image in any engine: it says which bytes they are."""
    return f"stackcheck/{stack_id or 'image'}:{config_digest.removeprefix('sha256:')[:12]}".lower()
