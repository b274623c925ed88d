"""Packages of an archive that a stage unpacks by hash: AMD's management library.

In: a plan, whose stage copies a `NAME.sha256` (the hash, and the path below the archive's address); folders
of this host, a wheel cache, the mirrors. Out: the files by name, in the folder that the stage is handed. What
no folder has is downloaded by the host's apt, with its logins; a build step gets none.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.engine import apt_archive
from stackcheck.errors import BuildError
from stackcheck.files.digest import sha256_of
from stackcheck.recipe import rocm

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from stackcheck.imaging.plans import BuildPlan
    from stackcheck.imaging.stages import Stage
    from stackcheck.imaging.wheels.wheel_cache import WheelCache
    from stackcheck.mirrors import Mirrors

SUFFIX = ".sha256"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pinned:
    """A package that a stage unpacks: its name, its path in the archive, its hash."""

    name: str
    path: str
    sha256: str

    @property
    def file(self) -> str:
        """The file's name alone."""
        return self.path.rpartition("/")[2]


def pinned(plan: BuildPlan, stage: Stage | None = None) -> tuple[Pinned, ...]:
    """What the stages of a plan, or one of them, unpack."""
    stages = [stage] if stage else plan.stages
    names = dict.fromkeys(name for one in stages for name in one.files if name.endswith(SUFFIX))
    return tuple(_read(name, plan.files[name]) for name in names)


def address(plan: BuildPlan, one: Pinned) -> str:
    """The public address of a package."""
    return f"{_pins(plan, one)['archive']}/{one.path}"


def _pins(plan: BuildPlan, one: Pinned) -> Mapping[str, str]:
    return dict(json.loads(plan.files["pins.json"])["debs"][one.name])


def _read(name: str, data: bytes) -> Pinned:
    digest, path = data.decode().split()
    return Pinned(name=name.removesuffix(SUFFIX), path=path, sha256=digest)


def find(wanted: Sequence[Pinned], folders: Sequence[Path], cached: Path | None) -> dict[Pinned, Path]:
    """The files that this host has, by hash; a file with the right name and another hash does not count."""
    return {
        one: path
        for one in wanted
        for path in _candidates(one, folders, cached)
        if sha256_of(path) == one.sha256
    }


def _candidates(one: Pinned, folders: Sequence[Path], cached: Path | None) -> Iterator[Path]:
    """The cache first: the last that fits is taken."""
    places = [folder / one.file for folder in reversed(folders)]
    places += [cached / "wheels" / one.sha256 / one.file] if cached else []
    return (path for path in places if path.is_file())


def gather(
    plan: BuildPlan,
    folders: Sequence[Path],
    cache: WheelCache | None,
    mirrors: Mirrors,
    report: Callable[[str], None],
) -> Mapping[Pinned, Path]:
    """The files of a plan; what this host lacks is downloaded into the cache.

    Raises:
        BuildError: The archive has another file under that version than the lock says.
    """
    wanted = pinned(plan)
    found = find(wanted, folders, cache.folder if cache else None)
    for one in wanted:
        if one not in found and cache:
            report(f"{plan.stack.id}: downloading {one.file} into the wheel cache {cache.folder}")
            found[one] = _fetch(plan, one, cache, mirrors)
    return found


def _fetch(plan: BuildPlan, one: Pinned, cache: WheelCache, mirrors: Mirrors) -> Path:
    source = rocm.source(plan.stack, mirrors)
    version = _pins(plan, one)["version"]
    with tempfile.TemporaryDirectory() as scratch:
        path = apt_archive.fetch(source, one.name, version, Path(scratch))
        path = path.rename(path.with_name(one.file))
        if sha256_of(path) != one.sha256:
            raise BuildError(
                f"the archive has another {one.file} than the lock says",
                where=source.uris[0],
                got=sha256_of(path),
                expected=one.sha256,
                next_step=f"find out why, then: stackcheck lock {plan.stack.id}",
            )
        return cache.keep_file(path)
