"""Where a build's wheels come from: the wheel cache, this host's own folders and indexes, or one folder.

In: the options of a build, the stacks' locks. Out: a folder of wheels and a pip.conf for each stage that
installs wheels, and for each stage that copies a `NAME.sha256` the packages of AMD's archive with these
hashes. What is missing is named with the command that downloads it; a build step gets no login.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name

from stackcheck.engine import apt
from stackcheck.errors import BuildError
from stackcheck.files import requirements
from stackcheck.files.digest import sha256_of
from stackcheck.files.requirements import Locked
from stackcheck.imaging import platforms
from stackcheck.imaging.stages import Stage
from stackcheck.imaging.wheels import host_settings, wheelhouse
from stackcheck.imaging.wheels.wheel_cache import WheelCache
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import lock, rocm
from stackcheck.recipe.upstream import Upstream

if TYPE_CHECKING:
    from stackcheck.imaging.plans import BuildPlan

_SOURCE = re.compile(r"--no-binary[ =]([A-Za-z0-9][A-Za-z0-9._-]*)")
_PIP = re.compile(r"\bpip (?:install|wheel|download)\b[^&|;]*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Supply:
    """Where wheels come from."""

    settings: host_settings.HostSettings  # folders, indexes and certificates
    closed: bool  # whether `settings` names one folder beside which nothing is asked
    cache: WheelCache | None
    cached: Mapping[str, Path]
    debs: Mapping[Pinned, Path]  # the packages that stages unpack, where this host has or got them
    upstream: Upstream  # knows which places of torch's makers this machine reaches
    report: Callable[[str], None]  # gets a line for what a user would not expect

    def pip_conf(self) -> str:
        """For a stage that is handed no folder of wheels."""
        return "[global]\nno-index = true\n" if self.closed else self.settings.pip_conf(wheelhouse=False)

    def lay_out(self, plan: BuildPlan, stage: Stage, wheels: Path) -> str:
        """Fill a stage's folder of wheels; the pip.conf that goes with it."""
        wanted = packages(plan, stage)
        found = wheelhouse.look(wanted, self.settings, self.cached)
        named = found.lay_out(wheels)
        for one in pinned(plan, stage):
            if one in self.debs:
                shutil.copyfile(self.debs[one], wheels / one.file)
        lacking = found.missing(wanted, platforms.target(plan.stack, plan.platform))
        whole = bool(wanted) and not lacking and _all_by_hash(stage)
        closed = self.closed or whole
        also = self.upstream.beside(plan.stack, alone=self.settings.alone) if lacking and not closed else ()
        return self.settings.pip_conf(wheelhouse=bool(named), closed=closed, also=also)

    def handed_over(self, stages: Sequence[Stage]) -> Mapping[str, Path]:
        """Stage key -> the files that it handed over in an earlier build."""
        if not self.cache:
            return {}
        known = {s.key: self.cache.handed_over(s.key, self.report) for s in stages if s.hands_over}
        return {key: folder for key, folder in known.items() if folder}


def prepare(
    plans: Sequence[BuildPlan],
    *,
    wheelhouse_only: Path | None,
    cache: WheelCache | None,
    report: Callable[[str], None],
    mirrors: Mirrors = NO_MIRRORS,
) -> Supply:
    """Prepare what the builds of these plans install; download what is missing into the cache.

    Raises:
        BuildError: The one folder lacks a wheel, or a lock has no wheel for another platform.
    """
    settings = host_settings.only(wheelhouse_only) if wheelhouse_only else host_settings.host_settings()
    upstream = Upstream(mirrors=mirrors)
    cached: dict[str, Path] = {}
    unpacked: dict[Pinned, Path] = {}
    for plan in plans:
        # The packages of which a stage takes the source archive: no wheel of them is looked for.
        lines = [line for stage in plan.stages for line in stage.instructions]
        compiled = frozenset(canonicalize_name(name) for line in lines for name in _SOURCE.findall(line))
        wanted = tuple(package for package in all_packages(plan) if package.name not in compiled)
        if wheelhouse_only:
            check_folder(plan, wheelhouse_only)
            unpacked |= find(pinned(plan), [wheelhouse_only], None)
            continue
        unpacked |= gather(plan, settings.folders, cache, mirrors, report)
        held = _from_cache(plan, wanted, (settings, upstream), cache, report) if cache else {}
        cached |= held
        if plan.foreign:
            _check_platform(plan, wanted, wheelhouse.look(wanted, settings, held))
    return Supply(
        settings=settings,
        closed=wheelhouse_only is not None,
        cache=cache,
        cached=cached,
        debs=unpacked,
        upstream=upstream,
        report=report,
    )


def all_packages(plan: BuildPlan) -> tuple[Locked, ...]:
    """The packages that the stages of a plan install."""
    return tuple({package: None for stage in plan.stages for package in packages(plan, stage)})


def packages(plan: BuildPlan, stage: Stage) -> tuple[Locked, ...]:
    """The packages that a stage installs: those of its locks, and those that its instructions pin by hash."""
    if not stage.takes_wheels:
        return ()
    texts = [plan.files[name].decode() for name in _locks(plan, stage)]
    found = [package for text in texts for package in requirements.read_packages(text)]
    found += [
        package
        for line in stage.instructions
        for package in requirements.read_packages(line)
        if package.hashes
    ]
    return tuple(dict.fromkeys(found))


def _locks(plan: BuildPlan, stage: Stage) -> tuple[str, ...]:
    """The locks that a stage copies; else those of the stage that it starts from; else the stack's own."""
    if any(name.endswith(SUFFIX) for name in stage.files):
        return ()
    by_name = {other.name: other for other in plan.stages}
    step: Stage | None = stage
    while step:
        if found := tuple(name for name in step.files if name.endswith(".lock")):
            return found
        step = by_name.get(step.parent or "")
    return ("requirements.lock",) if "requirements.lock" in plan.files else ()


def _all_by_hash(stage: Stage) -> bool:
    """Whether every pip of a stage only takes what is pinned by hash, or a file that it is handed.

    A stage without one may call pip from a script, of which nothing is known: not by hash.
    """
    commands = [found for line in stage.instructions for found in _PIP.findall(line)]
    return bool(commands) and all(
        "--require-hashes" in command or "--no-index" in command for command in commands
    )


def _from_cache(
    plan: BuildPlan,
    wanted: Sequence[Locked],
    places: tuple[host_settings.HostSettings, Upstream],
    cache: WheelCache,
    report: Callable[[str], None],
) -> Mapping[str, Path]:
    """The cached files of locked packages; wheels that this host lacks are downloaded first."""
    settings, upstream = places
    target = platforms.target(plan.stack, plan.platform)
    held = cache.find(wanted, report)
    lacking = wheelhouse.look(wanted, settings, held).missing(wanted, target)
    if not lacking:
        return held
    report(f"{plan.stack.id}: downloading {len(lacking)} wheels into the wheel cache {cache.folder}")
    also = upstream.beside(plan.stack, alone=settings.alone)
    refused = cache.fill(lacking, target, tuple(f"{option}={place}" for option, place in also))
    if refused and not plan.foreign:
        names = ", ".join(map(str, refused))
        report(f"{plan.stack.id}: not cached; pip will fetch these during the build: {names}")
    return cache.find(wanted, report)


def check_folder(plan: BuildPlan, folder: Path) -> None:
    """Hold one folder of wheels to a stack's lock.

    Raises:
        BuildError: It lacks wheels for the target; the message has the command that fetches them.
    """
    wanted = all_packages(plan)
    target = platforms.target(plan.stack, plan.platform)
    lacking = wheelhouse.look(wanted, host_settings.only(folder), {}).missing(wanted, target)
    unpacked = pinned(plan)
    absent = [one.file for one in unpacked if one not in find(unpacked, [folder], None)]
    if lacking or absent:
        raise BuildError(
            f"the folder of wheels lacks {len(lacking) + len(absent)} of "
            f"{len(wanted) + len(unpacked)} packages "
            f"for {plan.platform}",
            where=str(folder),
            got="\n    ".join([*map(str, lacking), *absent]),
            expected=f"every file that the locks of images/{plan.stack.id} name, by its hash",
            next_step=f"on a machine with network: {download_command(plan, lacking, folder)}",
        )


def download_command(plan: BuildPlan, lacking: Sequence[Locked], folder: Path) -> str:
    """The command that downloads all files of a stack's locks for its platform, on any machine."""
    recipe = lock.downloads(plan.stack)
    options = platforms.target(plan.stack, plan.platform).shell_options
    place = shlex.quote(str(folder))
    locks = dict.fromkeys(name for stage in plan.stages if stage.takes_wheels for name in _locks(plan, stage))
    commands = []
    for name in locks:
        locked = requirements.read_packages(plan.files[name].decode())
        if not {package.name for package in locked} <= {*recipe.by_hand}:
            path = shlex.quote(f"images/{plan.stack.id}/{name}")
            commands.append(f"pip download --no-deps {options}{recipe.options} --dest {place} -r {path}")
    commands += [
        f"pip download --no-deps --dest {place} {recipe.by_hand[package.name]}"
        for package in lacking
        if package.name in recipe.by_hand
    ]
    commands += [f"curl -fsSL -o {place}/{one.file} {address(plan, one)}" for one in pinned(plan)]
    return " && ".join(commands)


def _check_platform(plan: BuildPlan, wanted: Sequence[Locked], found: wheelhouse.FoundWheels) -> None:
    lacking = found.missing(wanted, platforms.target(plan.stack, plan.platform))
    if lacking:
        raise BuildError(
            f"{len(lacking)} of {len(wanted)} packages have no wheel for {plan.platform}",
            where=plan.stack.id,
            got="\n    ".join(map(str, lacking)),
            expected="a wheel of each, in the indexes and with its hash in the lock",
            next_step=f"on a host of {plan.platform}: stackcheck lock {plan.stack.id}",
        )


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
        path = apt.fetch(source, one.name, version, Path(scratch))
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
