"""Who signs: the key in a file, or a program that has the key (a hardware token, a key service).

In: a path, or a command. Out: a `Signer`. The program gets the bytes to sign on its standard input, and
prints the ECDSA signature of their SHA-256, as DER or as 64 bytes. It is accepted only if a trusted public
key confirms it.
"""

import contextlib
import os
import resource
import shlex
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from stackcheck.certificate import keyring, keys
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.passphrase import VARIABLES
from stackcheck.errors import ConfigurationError

TIMEOUT_S = 120.0  # somebody may have to touch a token
RAW_BYTES = 64  # r and s, 32 bytes each
MOST_PRINTED_BYTES = 2**20
LONGEST_BYTES = 80  # of a DER signature on P-256: 72


class Signer(Protocol):
    """What signs statements; a private key of `cryptography` is one."""

    def public_key(self) -> Pinned:
        """The keys that its owner trusts, its own among them."""

    def sign(self, data: bytes, signature_algorithm: ec.ECDSA) -> bytes:
        """The DER signature of these bytes."""


@dataclass(frozen=True, kw_only=True)
class RingSigner:
    """A private key whose owner trusts further keys: those before it."""

    key: ec.EllipticCurvePrivateKey
    ring: keyring.Keyring

    def public_key(self) -> Pinned:
        """All keys beside the private one."""
        return self.ring

    def sign(self, data: bytes, signature_algorithm: ec.ECDSA) -> bytes:
        """The signature of the private key."""
        return self.key.sign(data, signature_algorithm)


@dataclass(frozen=True, kw_only=True)
class CommandSigner:
    """A program that signs; the private key never comes here."""

    command: tuple[str, ...]
    public: Pinned

    def public_key(self) -> Pinned:
        """What its signatures are checked with."""
        return self.public

    def sign(self, data: bytes, signature_algorithm: ec.ECDSA) -> bytes:
        """What the program prints, in DER.

        Raises:
            ConfigurationError: It failed, or printed no signature of a trusted key that is not retired.
        """
        del signature_algorithm  # the contract with the program names it
        printed = self._run(data)
        signature = _der(printed) if len(printed) == RAW_BYTES else printed
        found = keyring.signer(self.public, signature, data)
        if found is None or found.retired is not None:
            raise self._error(
                f"{len(printed)} bytes, no signature that a trusted key confirms"
                if found is None
                else "a signature of a key that is retired",
                "the ECDSA signature of the SHA-256 of its input, by the key in --key, as DER or 64 bytes",
            )
        return signature

    def _run(self, data: bytes) -> bytes:
        env = {name: value for name, value in os.environ.items() if name not in VARIABLES}
        # Files, not pipes: a child that keeps them open holds up nothing, and what is printed has a limit.
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile() as printed,
            tempfile.TemporaryFile() as said,
        ):
            given.write(data)
            given.seek(0)
            try:
                code = _ended(
                    subprocess.Popen(self.command, stdin=given, stdout=printed, stderr=said, env=env)
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise self._error(str(error), f"an answer within {TIMEOUT_S:g} s") from error
            length = os.fstat(printed.fileno()).st_size
            printed.seek(0)
            found = printed.read(LONGEST_BYTES + 1)
            said.seek(0)
            words = said.read(MOST_PRINTED_BYTES).decode(errors="replace").strip()[-300:]
        if code or not 0 < len(found) <= LONGEST_BYTES:
            got = f"exit {code}, {length} bytes on standard output; {words}"
            raise self._error(got, "exit 0, and a signature on standard output")
        return found

    def _error(self, got: str, expected: str) -> ConfigurationError:
        return ConfigurationError(
            "the program of --sign-with gave no valid signature",
            where=shlex.join(self.command),
            got=got,
            expected=expected,
            next_step="try it by hand: printf x | CMD | wc -c; and name its public key: --key FILE.pub",
        )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a program that may write no large file; killed when it does not end in time."""
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (MOST_PRINTED_BYTES, MOST_PRINTED_BYTES))
    try:
        return process.wait(TIMEOUT_S)
    finally:
        process.kill()  # nothing, where it has ended
        process.wait()


def choose(path: Path, command: tuple[str, ...] = (), *, create: bool = False) -> Signer:
    """What signs: the key in a file, which `create` makes if it is missing, or a command that has the key.

    With a command, `path` is its public key.

    Raises:
        ConfigurationError: The key cannot be used.
    """
    if command:
        return CommandSigner(command=command, public=keys.load_public(path))
    key = keys.load_or_create(path) if create else keys.load_private_key(path)
    ring = _ring_beside(path, key)
    return RingSigner(key=key, ring=ring) if ring else key


def _ring_beside(path: Path, key: ec.EllipticCurvePrivateKey) -> keyring.Keyring | None:
    """The keyring in the public file beside a signing key, if it has this key, and more.

    Raises:
        ConfigurationError: The key is retired there.
    """
    public = keys.public_path(path)
    if not public.exists():
        return None
    found = keys.load_public(public)
    name = keyring.hint(key.public_key())
    own = [item for item in keyring.trusted(found) if keyring.hint(item.key) == name]
    if not isinstance(found, keyring.Keyring) or not own:
        return None
    if own[0].retired:
        raise ConfigurationError(
            "the signing key is retired",
            where=str(public),
            got=f"retired: {own[0].retired.isoformat()}",
            expected="a key that is not retired",
            next_step="name the new key: --key PATH",
        )
    return found


def _der(raw: bytes) -> bytes:
    half = RAW_BYTES // 2
    return encode_dss_signature(int.from_bytes(raw[:half]), int.from_bytes(raw[half:]))
