"""The distributions that are installed in a Python environment, as their RECORD files list them.

In: an interpreter. Out: an `Environment`: for each distribution the files of the wheel that it came from,
with the hash that RECORD states. What an installer wrote itself (byte code, launchers of entry points,
notes of its own) is left out: the next installer writes it again. Format:
https://packaging.python.org/en/latest/specifications/recording-installed-packages/
"""

import base64
import binascii
import csv
import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal

from packaging.utils import canonicalize_name

from stackcheck.errors import BuildError, ConfigurationError

TIMEOUT_S = 120.0
# -I: neither PYTHONPATH nor the user's own packages are the environment's.
_ASK = """
import importlib.metadata, json, platform, sys, sysconfig
found = [str(getattr(d, "_path", "")) for d in importlib.metadata.distributions()]
paths = sysconfig.get_paths()
version = platform.python_version()
print(json.dumps({"python": version, "prefix": sys.prefix, "paths": paths, "found": found}))
"""
# Written by the installer, and not by the wheel.
_NOTES = frozenset(
    {"RECORD", "RECORD.jws", "RECORD.p7s", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
)
_STRONG = ("sha256", "sha384", "sha512")
_SHOWN = 12

Kind = Literal["root", "scripts", "headers", "data"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One file of a wheel."""

    name: str
    path: Path  # where it is installed
    kind: Kind  # `scripts`: its first line may name the interpreter, which a wheel leaves open
    algorithm: str  # of the hash that RECORD states
    digest: bytes  # that hash
    size_bytes: int | None  # as RECORD states it; None if it does not


@dataclasses.dataclass(frozen=True, kw_only=True)
class InstalledDistribution:
    """One installed distribution."""

    name: str  # normalized (PEP 503)
    version: str
    stem: str  # `NAME-VERSION` as its folder of metadata spells it
    file: str  # the name of the wheel that it came from, from its tags
    info: Path
    members: tuple[Member, ...]  # the wheel's files, sorted
    size_bytes: int  # of all of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Environment:
    """An interpreter with what is installed beside it."""

    python: str
    prefix: Path
    paths: Mapping[str, Path]  # its installation scheme (`sysconfig`)
    infos: Mapping[str, Path]  # folders of metadata by normalized name, the one that an import finds first


def _failure(error: OSError | subprocess.SubprocessError | ValueError) -> str:
    """Why an interpreter failed, without the text of the program that it was given."""
    if isinstance(error, subprocess.CalledProcessError):
        return str(error.stderr).strip() or f"it ended with exit code {error.returncode}"
    if isinstance(error, subprocess.TimeoutExpired):
        return f"no answer in {error.timeout:g} s"
    return str(error)


def environment(interpreter: Path) -> Environment:
    """Ask an interpreter where its packages are.

    Raises:
        ConfigurationError: It is not a Python that runs here.
    """
    command = [str(interpreter), "-I", "-c", _ASK]
    try:
        done = subprocess.run(command, capture_output=True, errors="replace", check=True, timeout=TIMEOUT_S)
        answer = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(
            "the packages of this Python interpreter cannot be listed",
            where=str(interpreter),
            got=_failure(error),
            expected="the path of a Python 3.8 or newer, such as /opt/venv/bin/python",
            next_step="name the environment's own interpreter with --from-environment",
        ) from error
    paths = {name: Path(path) for name, path in answer["paths"].items()}
    own = {_real(paths["purelib"]), _real(paths["platlib"])}
    infos: dict[str, Path] = {}
    for path in map(Path, answer["found"]):
        # What lies elsewhere belongs to the system's package manager, which keeps no RECORD.
        if path.suffix in {".dist-info", ".egg-info"} and _real(path.parent) in own:
            infos.setdefault(canonicalize_name(_stem(path).partition("-")[0]), path)
    return Environment(python=answer["python"], prefix=Path(answer["prefix"]), paths=paths, infos=infos)


def read(found: Environment, names: Sequence[str]) -> tuple[InstalledDistribution, ...]:
    """The named distributions, if a wheel can be made again from every one of them.

    Raises:
        BuildError: One has no RECORD, is editable, or lists a file without a hash or outside the environment.
    """
    read_, problems = [], []
    for name in names:
        try:
            read_.append(_distribution(found, found.infos[name]))
        except BuildError as error:
            problems.append(error)
    refuse(problems, found.prefix)
    return tuple(read_)


def refuse(problems: Sequence[BuildError], prefix: Path) -> None:
    """Raise one error for all problems of an environment, if there is any.

    Raises:
        BuildError: There is a problem.
    """
    if not problems:
        return
    lines = [f"{error.where}: {error.what}: {error.got}" for error in problems[:_SHOWN]]
    lines += [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    raise BuildError(
        f"no wheel can be made from {len(problems)} of the distributions",
        where=str(prefix),
        got="\n    ".join(lines),
        expected="distributions installed from wheels, every file as its RECORD says",
        next_step="\n    ".join(dict.fromkeys(str(error.next_step) for error in problems[:_SHOWN])),
    )


def _distribution(found: Environment, info: Path) -> InstalledDistribution:
    stem = _stem(info)
    name, _, version = stem.partition("-")
    path = info / "RECORD"
    if info.suffix != ".dist-info" or not path.is_file():
        raise BuildError(
            "it has no RECORD, so nothing says which files are its own",
            where=stem,
            got=str(info),
            next_step=f"install it from a wheel: pip install --force-reinstall --no-deps {_pin(stem)}",
        )
    record = [row for row in csv.reader(path.read_text(encoding="utf-8").splitlines()) if row]
    _refuse_editable(info, stem)
    members = tuple(sorted(_members(found, info, stem, record), key=_order))
    sizes = [member.size_bytes or 0 for member in members]
    return InstalledDistribution(
        name=canonicalize_name(name),
        version=version,
        stem=stem,
        file=f"{stem.replace(' ', '_')}-{_tags(info, stem)}.whl",
        info=info,
        members=members,
        size_bytes=sum(sizes),
    )


def _refuse_editable(info: Path, stem: str) -> None:
    path = info / "direct_url.json"
    origin = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if origin.get("dir_info", {}).get("editable"):
        raise BuildError(
            "it is installed as editable: its files are in a folder of sources, not in the environment",
            where=stem,
            got=str(origin.get("url")),
            next_step=f"build its wheel: pip wheel --no-deps -w DIR {str(origin.get('url')).removeprefix('file://')}",
        )


def _members(found: Environment, info: Path, stem: str, record: Sequence[Sequence[str]]) -> Iterator[Member]:
    launchers = _launchers(info)
    for row in record:
        path, stated, size = (*row, "", "")[:3]
        place = Path(os.path.normpath(info.parent / path))
        if _written_by_installer(place, info, path) or (
            place.parent == found.paths["scripts"] and _bare(place.name) in launchers
        ):
            continue
        algorithm, digest = _hash(stated, stem, path)
        kind, name = _place(found, place, info, stem)
        yield Member(
            name=name,
            path=place,
            kind=kind,
            algorithm=algorithm,
            digest=digest,
            size_bytes=int(size) if size else None,
        )


def _written_by_installer(place: Path, info: Path, path: str) -> bool:
    if place.parent == info and place.name in _NOTES:
        return True
    return place.suffix == ".pyc" and "__pycache__" in PurePosixPath(path).parts


def _hash(stated: str, stem: str, path: str) -> tuple[str, bytes]:
    algorithm, _, value = stated.partition("=")
    try:
        digest = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4))
    except (ValueError, binascii.Error):
        digest = b""
    if algorithm not in _STRONG or not digest:
        raise BuildError(
            "its RECORD lists a file without a hash",
            where=stem,
            got=f"{path} {stated or '(none)'}",
            next_step=f"install it again from a wheel, with pip or uv: {_pin(stem)}",
        )
    return algorithm, digest


def _place(found: Environment, place: Path, info: Path, stem: str) -> tuple[Kind, str]:
    """The wheel's folder for a file, and its path in the wheel."""
    if place.is_relative_to(info.parent):
        return "root", str(PurePosixPath(place.relative_to(info.parent)))
    name = stem.partition("-")[0]
    headers = found.prefix / "include" / "site" / f"python{'.'.join(found.python.split('.')[:2])}"
    folders: tuple[tuple[Kind, Path], ...] = (
        ("scripts", found.paths["scripts"]),
        *(("headers", headers / spelt) for spelt in dict.fromkeys((name, name.replace("_", "-")))),
        ("data", found.prefix),
    )
    for kind, folder in folders:
        if place.is_relative_to(folder):
            return kind, f"{stem}.data/{kind}/{PurePosixPath(place.relative_to(folder))}"
    raise BuildError(
        "its RECORD lists a file outside the environment",
        where=stem,
        got=str(place),
        next_step=f"install it again from a wheel: {_pin(stem)}",
    )


def _launchers(info: Path) -> frozenset[str]:
    """The programs that an installer makes from entry points."""
    found = importlib.metadata.PathDistribution(info).entry_points
    return frozenset(_bare(one.name) for one in found if one.group in {"console_scripts", "gui_scripts"})


def _bare(name: str) -> str:
    """A launcher's name without a version: installers write pip, pip3 and pip3.12 for one entry point."""
    return re.sub(r"-?[0-9]+(\.[0-9]+)*$", "", name)


def _tags(info: Path, stem: str) -> str:
    """`[BUILD-]PYTHON-ABI-PLATFORM`, from the file WHEEL; several tags are joined, as in a file's name."""
    path = info / "WHEEL"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    tags = [tag.strip().split("-") for tag in re.findall(r"^Tag:(.*)$", text, re.MULTILINE)]
    if not tags or any(len(tag) != 3 for tag in tags):
        raise BuildError(
            "its file WHEEL names no tag, so nothing says where it may be installed",
            where=stem,
            got=str(path),
            next_step=f"install it again from a wheel: {_pin(stem)}",
        )
    build = re.search(r"^Build:\s*(\S+)$", text, re.MULTILINE)
    joined = [".".join(sorted(dict.fromkeys(column))) for column in zip(*tags, strict=True)]
    return "-".join([*([build[1]] if build else []), *joined])


def _order(member: Member) -> tuple[bool, str]:
    """Metadata last, as the format recommends."""
    return ".dist-info/" in member.name.partition("/")[0] + "/", member.name


def _stem(info: Path) -> str:
    return info.name.rpartition(".")[0]


def _pin(stem: str) -> str:
    """The package and its version in pip's form."""
    return stem.replace("-", "==", 1)


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))
