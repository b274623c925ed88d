"""Which keys a keyring file holds. In: the file as apt takes it, binary or armoured. Out: fingerprints.

A file of an archive's key is fetched once, over the network; its fingerprint is what says whose key it is.
"""

import base64
import binascii
import hashlib
from collections.abc import Iterator

PUBLIC_KEY, VERSION = 6, 4  # RFC 4880, sections 4.3 and 5.5.2
ARMOUR = b"-----BEGIN PGP PUBLIC KEY BLOCK-----"


def fingerprints(content: bytes) -> frozenset[str]:
    """The fingerprints of the primary keys.

    Raises:
        ValueError: This is no keyring, or has a key whose version is not 4.
    """
    try:
        return frozenset(_fingerprint(body) for tag, body in _packets(_binary(content)) if tag == PUBLIC_KEY)
    except (IndexError, binascii.Error) as error:
        raise ValueError("it ends in the middle of a packet") from error


def _binary(content: bytes) -> bytes:
    """The packets, without the armour: header lines, base64, a checksum that begins with '='."""
    if not content.lstrip().startswith(ARMOUR):
        return content
    lines = content.replace(b"\r", b"").strip().split(b"\n")
    begin = next(number for number, line in enumerate(lines, start=1) if not line.strip())
    return base64.b64decode(b"".join(line for line in lines[begin:-1] if not line.startswith(b"=")))


def _packets(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Tag and body of each packet (RFC 4880, section 4.2)."""
    at = 0
    while at < len(data):
        first = data[at]
        if not first & 0x80:
            raise ValueError("it is no OpenPGP keyring")
        is_new = first & 0x40
        tag = first & 0x3F if is_new else (first >> 2) & 0x0F
        size, begin = _new_length(data, at + 1) if is_new else _old_length(data, at + 1, first & 3)
        if begin + size > len(data):
            raise IndexError
        yield tag, data[begin : begin + size]
        at = begin + size


def _old_length(data: bytes, at: int, kind: int) -> tuple[int, int]:
    """The length of a body, and where the body begins."""
    if kind == 3:  # the packet does not state it
        return len(data) - at, at
    width = 1 << kind
    return int.from_bytes(data[at : at + width], "big"), at + width


def _new_length(data: bytes, at: int) -> tuple[int, int]:
    """The same, in the form of RFC 4880, section 4.2.2."""
    first = data[at]
    if first < 192:
        return first, at + 1
    if first < 224:
        return ((first - 192) << 8) + data[at + 1] + 192, at + 2
    if first != 255:
        raise ValueError("it has a packet of partial length, which no key has")
    return int.from_bytes(data[at + 1 : at + 5], "big"), at + 5


def _fingerprint(body: bytes) -> str:
    """RFC 4880, section 12.2."""
    if body[0] != VERSION:
        raise ValueError(f"it has a key of version {body[0]}, expected {VERSION}")
    hashed = b"\x99" + len(body).to_bytes(2, "big") + body
    return hashlib.sha1(hashed, usedforsecurity=False).hexdigest().upper()
