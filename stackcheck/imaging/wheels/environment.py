"""`stackcheck wheelhouse --from-environment`: a folder of wheels from what is installed.

In: an interpreter, a folder, and the requirements that the wheels are for (none: everything). Out: the
wheels of what the requirements need and the folder lacks, several at a time, and `wheelhouse.json`. A wheel
that the folder already has, such as one that was carried to the host, stays and is preferred.
Each file is held to the hash that RECORD states while it is copied, so that what was changed after its
installation never gets into a wheel; the wheel differs from the file of the index.
"""

import base64
import dataclasses
import hashlib
import os
import platform
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from email.parser import HeaderParser
from pathlib import Path
from typing import IO

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from stackcheck.errors import BuildError, FileError
from stackcheck.files import origins
from stackcheck.files.atomic import TEMPORARY, file_error, require_room, unfinished
from stackcheck.files.digest import sha256_of
from stackcheck.imaging.bootstrap import SOURCE_DATE_EPOCH
from stackcheck.imaging.wheels import installed
from stackcheck.imaging.wheels.installed import Environment, InstalledDistribution, Member


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """What a run did."""

    origins: origins.Origins
    written: tuple[str, ...]
    given: tuple[str, ...]
    absent: tuple[str, ...]  # requirements that neither the environment nor the folder has
    size_bytes: int


def fill(folder: Path, interpreter: Path, *, wanted: Sequence[str], report: Callable[[str], None]) -> Made:
    """Fill a folder of wheels from an environment, with what was asked for and its needs, or with everything.

    Raises:
        BuildError: A distribution has no RECORD, is editable, or has a file that was changed.
        ConfigurationError: The interpreter does not run.
        FileError: There is not enough room, or the folder cannot be written.
    """
    found = installed.environment(interpreter)
    given = _given(folder)
    names, absent = _chosen(found, given, wanted)
    distributions = installed.read(found, names)
    require_room(folder, sum(one.size_bytes for one in distributions), "the wheels")
    report(f"writing {len(distributions)} wheels from {found.prefix} into {folder}")
    hashes = _write(distributions, folder, found)
    wheels = [
        origins.Wheel(
            file=one.file, name=one.name, version=one.version, sha256=hashes[one.file], origin="environment",
            record=hashlib.sha256((one.info / "RECORD").read_bytes()).hexdigest(),
        )
        for one in distributions
    ]  # fmt: skip
    wheels += [
        origins.Wheel(
            file=path.name, name=name, version=path.name.split("-")[1], sha256=sha256_of(path), origin="given"
        )
        for name, path in given.items()
    ]
    source = origins.WheelSource(python=found.python, platform=f"linux-{platform.machine()}")
    listed = origins.Origins(environment=source, wheels=tuple(sorted(wheels, key=lambda wheel: wheel.file)))
    origins.save(folder, listed)
    return Made(
        origins=listed,
        written=tuple(one.file for one in distributions),
        given=tuple(path.name for path in given.values()),
        absent=absent,
        size_bytes=sum(one.size_bytes for one in distributions),
    )


def _given(folder: Path) -> Mapping[str, Path]:
    """The wheels that were in the folder before, by name; those of an earlier run are made again."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = origins.load_origins(folder)
        ours = {wheel.file for wheel in before.wheels if wheel.origin == "environment"} if before else set()
        for path in sorted(folder.iterdir()):
            if path.name in ours or path.name.startswith(TEMPORARY):
                path.unlink()
    except OSError as error:
        raise file_error(error, folder) from error
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name = parse_wheel_filename(path.name)[0]
        except InvalidWheelFilename as error:
            raise BuildError(
                "a file of the folder is not named like a wheel", where=str(path), got=str(error),
                expected="NAME-VERSION-PYTHON-ABI-PLATFORM.whl", next_step="rename or remove it",
            ) from error  # fmt: skip
        if name in found:
            raise BuildError(
                "the folder has two wheels of one package", where=str(folder),
                got=f"{found[name].name} and {path.name}", expected="one", next_step="remove one of them",
            )  # fmt: skip
        found[name] = path
    return found


def _chosen(
    found: Environment, given: Mapping[str, Path], wanted: Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names to make wheels of, and the requirements that nothing here has."""
    if not wanted:
        return tuple(sorted(set(found.infos) - set(given))), ()
    markers = {**default_environment(), "python_full_version": found.python}
    markers["python_version"] = ".".join(found.python.split(".")[:2])
    queue, seen, absent = [Requirement(text) for text in wanted], set[str](), dict[str, None]()
    names: dict[str, None] = {}
    while queue:
        one = queue.pop()
        name = canonicalize_name(one.name)
        key = f"{name}[{','.join(sorted(one.extras))}]"
        if key in seen:
            continue
        seen.add(key)
        if name not in given and name not in found.infos:
            absent[str(one)] = None
            continue
        if name not in given:
            names[name] = None
        text = _metadata_of_wheel(given[name]) if name in given else _metadata(found.infos[name])
        queue += _needs(text, one.extras, {key: str(value) for key, value in markers.items()})
    return tuple(sorted(names)), tuple(absent)


def _needs(metadata: str, extras: Iterable[str], markers: Mapping[str, str]) -> list[Requirement]:
    needs = []
    for text in HeaderParser().parsestr(metadata).get_all("Requires-Dist") or ():
        try:
            one = Requirement(text)
        except InvalidRequirement:  # invalid metadata of an old package: `pip check` in the image decides
            continue
        if one.marker is None or any(
            one.marker.evaluate({**markers, "extra": extra}) for extra in (*extras, "")
        ):
            needs.append(one)
    return needs


def _metadata(info: Path) -> str:
    path = info / "METADATA"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _metadata_of_wheel(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
            return archive.read(names[0]).decode()
    except (zipfile.BadZipFile, IndexError) as error:
        raise BuildError(
            "a file of the folder is not a wheel", where=str(path), got=str(error) or "no METADATA",
            expected="a zip archive with metadata", next_step="copy the file again",
        ) from error  # fmt: skip


def _write(
    distributions: Sequence[InstalledDistribution], folder: Path, found: Environment
) -> Mapping[str, str]:
    """Write all wheels, the largest first; file name -> SHA-256. On a problem none is left behind."""
    queue = sorted(distributions, key=lambda one: -one.size_bytes)
    hashes: dict[str, str] = {}
    problems: list[BuildError] = []
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            jobs = [pool.submit(write, one, folder) for one in queue]
            for job in jobs:
                try:
                    path, digest = job.result()
                    hashes[path.name] = digest
                except BuildError as error:
                    problems.append(error)
                except FileError:
                    pool.shutdown(wait=True, cancel_futures=True)
                    raise
        installed.refuse(sorted(problems, key=lambda error: str(error.where)), found.prefix)
    except (BuildError, FileError):
        for one in queue:
            (folder / one.file).unlink(missing_ok=True)
        raise
    return hashes


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
    target = folder / distribution.file
    with unfinished(target) as temporary:
        with zipfile.ZipFile(temporary, "x", zipfile.ZIP_STORED, strict_timestamps=True) as archive:
            lines = [_add(archive, member, distribution) for member in distribution.members]
            own = f"{distribution.info.name}/RECORD"
            archive.writestr(_entry(own, _FILE), "".join([*lines, f"{own},,\n"]))
        digest = sha256_of(temporary)
        temporary.chmod(0o644)
        temporary.replace(target)
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
