"""One installed distribution -> its wheel again.

In: an `InstalledDistribution`. Out: a wheel, the same bytes in every run. Each file is held to the hash that
RECORD states while it is copied, so that what was changed after its installation never gets into a wheel. The
wheel differs from the file of the index (order, times, no compression), so it has a different hash.
"""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import time
import zipfile
from typing import TYPE_CHECKING

from stackcheck.errors import BuildError
from stackcheck.files.atomic import TEMPORARY, file_error
from stackcheck.files.digest import sha256_of
from stackcheck.imaging.bootstrap import SOURCE_DATE_EPOCH

if TYPE_CHECKING:
    from pathlib import Path
    from typing import IO

    from stackcheck.imaging.wheels.installed import InstalledDistribution, Member

CHUNK_BYTES = 1 << 20
_DATE = time.gmtime(SOURCE_DATE_EPOCH)[:6]
_FILE, _PROGRAM = 0o100644 << 16, 0o100755 << 16
# What installers write into a script's first line: the interpreter, or a shell that starts it (long paths).
_INTERPRETER = re.compile(
    rb"\A#!(?!\s*/usr/bin/env\b)[^\n]*?(?P<window>pythonw?)[0-9.]*[ \t]*(?P<options>[^\n]*)\n"
)


def write(distribution: InstalledDistribution, folder: Path) -> tuple[Path, str]:
    """Write a distribution's wheel into a folder; its path and SHA-256.

    Raises:
        BuildError: A file is missing or is not what RECORD says.
        FileError: The disk is full, or the folder cannot be written.
    """
    temporary = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    target = folder / distribution.file
    try:
        try:
            with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED, strict_timestamps=True) as archive:
                lines = [_add(archive, member, distribution) for member in distribution.members]
                own = f"{distribution.info.name}/RECORD"
                archive.writestr(_entry(own, _FILE), "".join([*lines, f"{own},,\n"]))
            digest = sha256_of(temporary)
            temporary.chmod(0o644)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise file_error(error, target) from error
    return target, digest


def _add(archive: zipfile.ZipFile, member: Member, distribution: InstalledDistribution) -> str:
    """Copy one file and check it; its line of the new RECORD."""
    try:
        status = member.path.stat()
        if member.size_bytes not in {None, status.st_size}:
            raise _changed(distribution, member, f"{status.st_size} bytes", f"{member.size_bytes} bytes")
        entry = _entry(member.name, _PROGRAM if status.st_mode & 0o111 else _FILE)
        with member.path.open("rb") as source:
            if member.kind == "scripts":
                return _add_script(archive, entry, source.read(), member, distribution)
            entry.file_size = status.st_size  # decides whether the entry has 64-bit sizes
            digest, length = _copy(archive, entry, source, member, distribution)
    except FileNotFoundError:
        raise _changed(distribution, member, "no such file", "a file") from None
    return _line(member.name, digest, length)


def _copy(
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    source: IO[bytes],
    member: Member,
    distribution: InstalledDistribution,
) -> tuple[bytes, int]:
    hashed = hashlib.new(member.algorithm)
    ours = hashed if member.algorithm == "sha256" else hashlib.sha256()
    length = 0
    with archive.open(entry, "w") as target:
        while chunk := source.read(CHUNK_BYTES):
            hashed.update(chunk)
            if ours is not hashed:
                ours.update(chunk)
            target.write(chunk)
            length += len(chunk)
    _check(hashed.digest(), member, distribution)
    return ours.digest(), length


def _add_script(
    archive: zipfile.ZipFile,
    entry: zipfile.ZipInfo,
    data: bytes,
    member: Member,
    distribution: InstalledDistribution,
) -> str:
    """A script that names its interpreter gets `#!python` there: the next installer fills it in."""
    _check(hashlib.new(member.algorithm, data).digest(), member, distribution)
    data = _INTERPRETER.sub(rb"#!\g<window>\n", data, count=1)
    archive.writestr(entry, data)
    return _line(member.name, hashlib.sha256(data).digest(), len(data))


def _check(digest: bytes, member: Member, distribution: InstalledDistribution) -> None:
    if digest != member.digest:
        got, expected = (f"{member.algorithm}={_encoded(value)}" for value in (digest, member.digest))
        raise _changed(distribution, member, got, expected)


def _changed(distribution: InstalledDistribution, member: Member, got: str, expected: str) -> BuildError:
    pin = distribution.stem.replace("-", "==", 1)
    return BuildError(
        "a file was changed or removed after it was installed",
        where=distribution.stem,
        got=f"{member.path}: {got}, RECORD says {expected}",
        next_step=f"install it again: pip install --force-reinstall --no-deps {pin}",
    )


def _entry(name: str, attributes: int) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, _DATE)
    entry.external_attr = attributes
    entry.create_system = 3  # Unix: the attributes are a mode
    return entry


def _line(name: str, digest: bytes, length: int) -> str:
    quoted = f'"{name.replace(chr(34), chr(34) * 2)}"' if set(name) & set(',"') else name
    return f"{quoted},sha256={_encoded(digest)},{length}\n"


def _encoded(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
