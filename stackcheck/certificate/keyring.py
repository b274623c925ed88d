"""The public keys that a reader trusts: one, or several while a publisher changes keys.

In: PEM text, where a line `retired: DATE` may stand before a key. Out: a `Keyring`; the key that made a
signature. A verdict of PASSED counts only if it is from before its key was retired. A revocation always
counts.
"""

import base64
import datetime as dt
import hashlib
import re
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

BEGIN = "-----BEGIN"
ALGORITHM = ec.ECDSA(hashes.SHA256())
_BLOCK = re.compile(r"-----BEGIN PUBLIC KEY-----.*?-----END PUBLIC KEY-----\n?", re.DOTALL)
_RETIRED = re.compile(r"retired: (\S+)")


@dataclass(frozen=True, kw_only=True)
class TrustedKey:
    """A public key, and from when on its verdicts no longer count."""

    key: ec.EllipticCurvePublicKey
    retired: dt.datetime | None = None


@dataclass(frozen=True)
class Keyring:
    """Several trusted keys, in the order of their file."""

    keys: tuple[TrustedKey, ...]


Pinned = ec.EllipticCurvePublicKey | Keyring


def trusted(pinned: Pinned) -> tuple[TrustedKey, ...]:
    """The keys of what a reader trusts."""
    return pinned.keys if isinstance(pinned, Keyring) else (TrustedKey(key=pinned),)


def signer(pinned: Pinned, signature: bytes, data: bytes) -> TrustedKey | None:
    """The trusted key that signed these bytes, if one did."""
    return next((item for item in trusted(pinned) if _fits(item.key, signature, data)), None)


def hint(key: ec.EllipticCurvePublicKey) -> str:
    """How a sigstore bundle names a key (`publicKey.hint`): base64 of the SHA-256 of its SPKI DER."""
    spki = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return base64.b64encode(hashlib.sha256(spki).digest()).decode()


def hints(pinned: Pinned) -> tuple[str, ...]:
    """The names of all trusted keys."""
    return tuple(hint(item.key) for item in trusted(pinned))


def parse(text: str) -> Pinned:
    """The keys in PEM text. Text around them is a remark, as PEM allows, unless it mentions retirement.

    Raises:
        ValueError: It holds no key, a key of another kind, one key twice, or a retirement that is not clear.
    """
    found, rest = [], text
    while block := _BLOCK.search(rest):
        found.append(TrustedKey(key=_key(block[0]), retired=_retirement(rest[: block.start()])))
        rest = rest[block.end() :]
    if BEGIN in rest or _retirement(rest) or not found:
        raise ValueError(f"{len(found)} public keys, and after them: {rest.strip()[:80] or 'nothing'}")
    names = [hint(item.key) for item in found]
    if len(set(names)) < len(names):
        raise ValueError("the same key twice")
    alone = len(found) == 1 and found[0].retired is None
    return found[0].key if alone else Keyring(tuple(found))


def _key(block: str) -> ec.EllipticCurvePublicKey:
    key = serialization.load_pem_public_key(block.encode())
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError(kind(key))  # noqa: TRY004  # of a file's content, not of an argument
    return key


def kind(key: object) -> str:
    """The kind of a key: its class, and the curve of an elliptic one."""
    curve = getattr(key, "curve", None)
    return type(key).__name__ + (f" on {curve.name}" if curve else "")


def _retirement(text: str) -> dt.datetime | None:
    """The date in the lines before a key. A line that only looks like one must not be passed over."""
    lines = [line.strip() for line in text.splitlines() if not line.lstrip().startswith("#")]
    marked = [line for line in lines if "retire" in line.lower()]
    if BEGIN in text or len(marked) > 1:
        raise ValueError(f"not one key and one date: {text.strip()[:80]}")
    if not marked:
        return None
    match = _RETIRED.fullmatch(marked[0])
    if match is None:
        raise ValueError(f"{marked[0][:80]!r} is not `retired: YYYY-MM-DD`")
    moment = dt.datetime.fromisoformat(match[1])
    return moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)


def _fits(key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> bool:
    try:
        key.verify(signature, data, ALGORITHM)
    except InvalidSignature:
        return False
    return True
