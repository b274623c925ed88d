"""Signing keys: an ECDSA P-256 key pair on disk, made on first use, outside every checkout.

In: a path, or None for the user's own key. Out: the private key, or the public keys to trust. Both files are
PEM (PKCS8, with a passphrase or without, and SPKI), which `cosign import-key-pair` and `cosign
verify-attestation --key` read without conversion.
"""

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from stackcheck.certificate import keyring, passphrase
from stackcheck.certificate.keyring import Pinned
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.files import users
from stackcheck.files.regular import read_regular

KEY_NAME = "stackcheck.key"
LIMIT_BYTES = 2**16
MOST_STEPS = 400  # folders and links on the way to a file


def default_path() -> Path:
    """Where this user's signing key is: $XDG_CONFIG_HOME/stackcheck, or ~/.config/stackcheck."""
    return users.folder("XDG_CONFIG_HOME") / "stackcheck" / KEY_NAME


def public_path(path: Path) -> Path:
    """The path of the public key beside a signing key: x.pub for x.key, name.pub for any other name."""
    return path.with_name((path.stem if path.suffix == ".key" else path.name) + ".pub")


def load_or_create(path: Path | None = None, *, encrypt: bool = False) -> ec.EllipticCurvePrivateKey:
    """The signing key. If the file does not exist, it is made, mode 0600, with the public key beside it.

    Raises:
        ConfigurationError: The file cannot be made, is readable by others, or is not a P-256 key.
    """
    path = path or default_path()
    if not path.exists():
        _create(path, passphrase.new(path) if encrypt else None)
    return load_private_key(path)


def load_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The signing key in a file.

    Raises:
        ConfigurationError: There is no such file, it is readable by others, or it is not a P-256 key.
    """
    body = _read(path)
    require_own(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise ConfigurationError(
            "the signing key can be read by others",
            where=str(path),
            got=f"mode {stat.S_IMODE(path.stat().st_mode):04o}",
            expected="mode 0600",
            next_step=f"chmod 600 {path}; or make a new key, if others may have read this one",
        )
    secret = passphrase.known(path) if b"ENCRYPTED" in body else None
    try:
        key = serialization.load_pem_private_key(body, password=secret)
    except (ValueError, TypeError) as error:
        got = "a passphrase that does not open it" if secret is not None else str(error)
        raise _unusable_key(path, got) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise _unusable_key(path, keyring.kind(key))
    return key


def load_public(path: Path | None = None) -> Pinned:
    """The public keys to verify with, from a public or a signing key file; by default this user's own.

    Raises:
        CertificateError: There is no such file, so nothing can be verified.
        ConfigurationError: The file cannot be read or holds anything but P-256 keys.
    """
    own = default_path()
    path = path or (public_path(own) if public_path(own).exists() or not own.exists() else own)
    if not path.exists():
        raise CertificateError(
            "there is no public key to verify with",
            where=str(path),
            got="no such file",
            expected="an ECDSA P-256 public key in PEM",
            next_step="name the publisher's key: --key stackcheck.pub; or make your own: stackcheck key",
        )
    body = _read(path)
    require_own(path)
    if b"PRIVATE KEY" in body:
        return load_private_key(path).public_key()
    try:
        return keyring.parse(body.decode())
    except ValueError as error:
        raise _unusable_key(path, str(error)) from error


def public_pem(key: ec.EllipticCurvePublicKey) -> bytes:
    """The public key as PEM (SPKI)."""
    return key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def _write_public(path: Path, pem: bytes) -> None:
    """Write the public key. If that fails, delete the signing key too: there are both files or none."""
    public = public_path(path)
    created = [path]
    try:
        with public.open("xb") as file:
            created.append(public)
            file.write(pem)
    except OSError as error:
        for file_path in created:
            file_path.unlink(missing_ok=True)
        if not isinstance(error, FileExistsError):
            raise
        raise ConfigurationError(
            "the public key of a different signing key is in the way",
            where=str(public),
            got="a file that exists already",
            expected=f"no file there: it would be the public key of {path}",
            next_step="move that file away, or name a different signing key: --key PATH",
        ) from None


def _create(path: Path, secret: bytes | None) -> None:
    if path.suffix == ".pub":
        raise ConfigurationError(
            "the file name of the signing key ends like that of a public key",
            got=str(path),
            expected="a name that does not end in .pub",
            next_step=f"--key {path.with_suffix('.key')}",
        )
    key = ec.generate_private_key(ec.SECP256R1())
    encryption = serialization.BestAvailableEncryption(secret) if secret else serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=path.parent) as file:  # mode 0600 from its first byte
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
            try:
                os.link(file.name, path)  # never overwrites: another process may have been first
            except FileExistsError:
                return
        _write_public(path, public_pem(key.public_key()))
    except OSError as error:
        raise ConfigurationError(
            "the signing key could not be made",
            where=str(path),
            got=error.strerror,
            expected="a folder that you can write to",
            next_step="name a different place: --key PATH",
        ) from error


def _read(path: Path) -> bytes:
    try:
        body = read_regular(path, LIMIT_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(
            "the key cannot be read",
            where=str(path),
            got=error.strerror,
            expected="a file that you can read",
            next_step="name the key: --key PATH; or make one: stackcheck key",
        ) from error
    blocks = body.count(b"-----BEGIN")
    if len(body) > LIMIT_BYTES or (b"PRIVATE KEY" in body and blocks > 1):
        got = f"{blocks} keys, of which one is private" if blocks > 1 else f"more than {LIMIT_BYTES} bytes"
        raise _unusable_key(path, got)
    return body


def require_own(path: Path) -> None:
    """Refuse a file that others can change: it decides which images are accepted.

    Raises:
        ConfigurationError: It belongs to another user, or others can write it or a folder on the way.
    """
    file, own = path.stat(), {0, os.geteuid()}
    wrong = None
    if file.st_uid not in own:
        wrong = f"{path} belongs to user {file.st_uid}"
    elif file.st_mode & (stat.S_IWOTH if file.st_gid in {0, os.getegid()} else stat.S_IWOTH | stat.S_IWGRP):
        wrong = f"mode {stat.S_IMODE(file.st_mode):04o} of {path}"
    for folder in _folders(path):
        found = folder.stat()
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            wrong = wrong or f"mode {stat.S_IMODE(found.st_mode):04o} of the folder {folder}"
    if wrong:
        raise ConfigurationError(
            "other users can replace this key file",
            where=str(path),
            got=wrong,
            expected="a file of your own, or root's, and no folder on the way that everybody can write to",
            next_step=f"compare it with the publisher's, then: install -m 600 {path} FOLDER-OF-YOURS/",
        )


def _folders(path: Path) -> Iterator[Path]:
    """Each folder on the way to a file, also where links lead: in any of them it can be exchanged."""
    todo, at = list(path.absolute().parts), Path("/")
    for _ in range(MOST_STEPS):
        if not todo:
            return
        step = at / todo.pop(0)
        if step.is_symlink():
            todo = [*step.readlink().parts, *todo]
            continue
        at = step.parent.parent if step.name == ".." else step
        if todo:
            yield at
    raise _unusable_key(path, f"a path of more than {MOST_STEPS} steps")


def _unusable_key(path: Path, got: str) -> ConfigurationError:
    return ConfigurationError(
        "the file holds no key that can be used",
        where=str(path),
        got=got,
        expected="one ECDSA P-256 key in PEM, or several public ones",
        next_step="name a different key: --key PATH; or make one: stackcheck key --key NEW.key",
    )
