"""The public key that a user names: a file, or an address with the key's fingerprint.

In: a path, `https://…#sha256=FINGERPRINT`, or None for the user's own key. Out: the keys to trust. What an
address gives is trusted only if it has the fingerprint, which the user got in another way.
"""

import base64
import binascii
from pathlib import Path
from urllib.parse import urlsplit

import requests

from stackcheck.certificate import keyring, keys
from stackcheck.certificate.keyring import Pinned
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.oci.addresses import is_loopback

TIMEOUT_S = (10.0, 30.0)
FINGERPRINT = "#sha256=FINGERPRINT, as `stackcheck key` shows it (base64), or in hexadecimal"
SHA256_BYTES = 32


def public(source: str | Path | None) -> Pinned:
    """The keys to verify with.

    Raises:
        CertificateError: There is no such key, or its fingerprint differs from the given one.
        ConfigurationError: What was named cannot be a key.
    """
    if isinstance(source, str) and "://" in source:
        return _from_address(source)
    return keys.load_public(Path(source) if source is not None else None)


def _from_address(address: str) -> Pinned:
    parts = urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.netloc)):
        raise ConfigurationError(
            "a public key is fetched over https only", where=address, got=parts.scheme, expected="https"
        )
    name, _, text = parts.fragment.partition("=")
    try:
        raw = bytes.fromhex(text) if len(text) == 2 * SHA256_BYTES else base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raw = b""
    if name != "sha256" or len(raw) != SHA256_BYTES:
        raise ConfigurationError(
            "the address of a public key has no fingerprint",
            where=address,
            got=parts.fragment or "nothing after the address",
            expected=FINGERPRINT,
            next_step="ask the publisher for it, over another channel",
        )
    wanted = base64.b64encode(raw).decode()
    try:
        found = keyring.parse(_fetched(address.partition("#")[0]))
    except (requests.RequestException, ValueError) as error:
        raise CertificateError(
            "there is no public key at this address",
            where=address,
            got=str(error)[:200],
            expected="one ECDSA P-256 public key in PEM",
            next_step="fetch it by hand, compare its fingerprint, and name the file: --key FILE",
        ) from error
    if keyring.hints(found) != (wanted,):
        raise CertificateError(
            "the key at this address does not have the expected fingerprint",
            where=address,
            got=" and ".join(keyring.hints(found)),
            expected=wanted,
            next_step="ask the publisher for the fingerprint, over another channel",
        )
    return found


def _fetched(address: str) -> str:
    with requests.get(address, timeout=TIMEOUT_S, stream=True) as answer:
        answer.raise_for_status()
        body = answer.raw.read(keys.LIMIT_BYTES + 1, decode_content=True)
    if len(body) > keys.LIMIT_BYTES:
        raise ValueError(f"more than {keys.LIMIT_BYTES} bytes")
    return str(body.decode())
