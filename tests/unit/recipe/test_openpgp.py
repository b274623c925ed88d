"""AMD's key is known by its fingerprint, which this tool computes as gpg does."""

import base64
from pathlib import Path

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files import openpgp
from stackcheck.matrix import resolve
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import rocm

# Made with `gpg --quick-generate-key … ed25519 sign`; the fingerprint is what gpg lists.
FINGERPRINT = "63EF81905856ABEDBCD019C0E2CE1B949A6886FC"
BASE64 = """\
mDMEawL9RhYJKwYBBAHaRw8BAQdAvxDMcL/7IY6JvUgr/mV1X3A3LvWznW6go4RPfDSuuQ20H1N0
YW5kLWluIDxzdGFuZC1pbkBleGFtcGxlLm9yZz6IkAQTFggAOBYhBGPvgZBYVqvtvNAZwOLOG5Sa
aIb8BQJrAv1GAhsDBQsJCAcCBhUKCQgLAgQWAgMBAh4BAheAAAoJEOLOG5SaaIb8D7UBAPqf14Ys
YyYasFEcaSvBrxtpxp8DPCyhO2E3fYZEHcU8AQCu4losWE8jkACriqWVUJ6Umc19OQeGVNCIf2wd
l/+NDw==
"""
BINARY = base64.b64decode(BASE64)
ARMOURED = f"{openpgp.ARMOUR.decode()}\n\n{BASE64}=abcd\n-----END PGP PUBLIC KEY BLOCK-----\n".encode()
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("content", [BINARY, ARMOURED], ids=["binary", "armoured"])
def test_a_keys_fingerprint_is_that_of_gpg(content: bytes) -> None:
    assert openpgp.fingerprints(content) == {FINGERPRINT}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>not found</html>", "no OpenPGP keyring"),
        (BINARY[:40], "in the middle of a packet"),
        (BINARY[:2] + b"\x05" + BINARY[3:], "key of version 5, expected 4"),
        (b"\x99\x00", "in the middle of a packet"),
        (b"\xc6\xe1", "a packet of partial length"),
    ],
)
def test_what_is_no_key_is_named(content: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        openpgp.fingerprints(content)


def test_another_key_than_amds_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = next(stack for stack in resolve.load_stacks(ROOT) if rocm.takes_smi(stack))
    key = tmp_path / "rocm.gpg"
    key.write_bytes(BINARY)
    own = Mirrors(keys={"https://repo.radeon.com": key})
    assert rocm.source(stack, own).signed_by == str(key)  # a site's own choice
    monkeypatch.setattr(rocm, "KEY", key)
    for content, got in ((BINARY, FINGERPRINT), (b"<html>", "it is no OpenPGP keyring"), (b"", "no key")):
        key.write_bytes(content)
        with pytest.raises(
            ConfigurationError, match="must hold the key of AMD's package archive and no other"
        ) as no:
            rocm.source(stack, NO_MIRRORS)
        assert no.value.got == got
        assert no.value.expected == rocm.FINGERPRINT
    monkeypatch.setattr(rocm, "FINGERPRINT", FINGERPRINT)
    key.write_bytes(BINARY)
    assert rocm.source(stack, NO_MIRRORS).signed_by == str(key)
    key.write_bytes(BINARY + BINARY.replace(b"\xbf\x10", b"\xbf\x11"))  # apt would take the other's signature
    with pytest.raises(ConfigurationError, match="and no other"):
        rocm.source(stack, NO_MIRRORS)
