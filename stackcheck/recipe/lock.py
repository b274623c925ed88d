"""Write a stack's lock: every package by hash (`*.lock`), bases by digest, files by name (`pins.json`).

In: stacks, the package indexes that this machine's pip uses, registries and release pages. Out: files under
images/<stack-id>/. If something cannot be reached here, what was locked before stays, or pins.json names it
as missing and the stack is unlocked: `build` refuses it until a machine that reaches it has locked it.
"""

import dataclasses
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stackcheck.engine import apt
from stackcheck.errors import BuildError, ConfigurationError, EngineError
from stackcheck.files.atomic import write_atomically
from stackcheck.files.digest import sha256_of
from stackcheck.files.requirements import read_packages
from stackcheck.matrix.stack import TORCH_INDEX, Stack
from stackcheck.recipe import indexes, rocm
from stackcheck.recipe.extensions import Extension, extensions, needs, overrides, toolchain
from stackcheck.recipe.indexes import UnresolvedError
from stackcheck.recipe.upstream import OutOfReachError, Upstream, torch_places

_Answer = TypeVar("_Answer")
_HEAD = """\
# {what} with the hashes of its files: written by `stackcheck lock`. Do not edit.
# torch's own index, where its wheel is not in yours: {index}
"""


# What the matrix chose instead of torch's own pins.
CHOSEN = "chosen"
_WHAT = {
    "requirements": "Every package",
    "toolchain": "What compiles the wheels",
    CHOSEN: "What is installed instead of torch's own pins,",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LockResult:
    """The result of locking one stack."""

    missing: tuple[str, ...]  # what the lock lacks, one reason each; empty when the stack is locked
    kept: tuple[str, ...]  # what was locked before and could not be checked again, with the reason


def lock(
    stack: Stack, images: Path, upstream: Upstream | None = None, *, wheelhouse: Path | None = None
) -> LockResult:
    """Lock one stack. `upstream` asks registries: share one, and a host that does not answer is asked once.

    Wheels come from the folder alone where one is given.

    Raises:
        BuildError: The folder lacks a wheel; nothing was written.
    """
    return _Locking(stack, images / stack.id, upstream or Upstream(), wheelhouse).run()


class _Locking:
    """The locking of one stack: what is known so far, and what is missing."""

    def __init__(self, stack: Stack, folder: Path, upstream: Upstream, wheelhouse: Path | None) -> None:
        self.stack = stack
        self.wheel_folder = WheelFolder(wheelhouse) if wheelhouse else None
        self.folder = folder
        self.upstream = upstream
        self.missing: list[str] = []
        self.kept: list[str] = []
        pins = folder / "pins.json"
        self.before: Mapping[str, Any] = json.loads(pins.read_text("utf-8")) if pins.is_file() else {}

    def run(self) -> LockResult:
        wanted = (*self.stack.requirements, *needs(self.stack))
        image = self._write("requirements", wanted, lambda: self._resolve(wanted))
        path = self.folder / "requirements.lock"
        if image:
            # The locks that agree with the image's own: one version of each package in both.
            locked = {name: version for name, (version, _) in indexes.read_lock(path).items()}
            if tools := toolchain(self.stack):
                pins = [f"{name}=={version}" for name, version in locked.items()]
                self._write("toolchain", tools, lambda: self._resolve(tools, pins))
            chosen = {one.name: one.pin for one in self.stack.replacements}
            if chosen:
                kept = [f"{name}=={version}" for name, version in locked.items() if name not in chosen]
                self._write(CHOSEN, [*chosen.values()], lambda: self._resolve([*chosen.values()], kept))
            else:
                (self.folder / f"{CHOSEN}.lock").unlink(missing_ok=True)
        self.missing += disagreements(self.stack, path)
        document = {
            "schema": 1,
            "stack_id": self.stack.id,
            "locked": False,
            "missing": self.missing,
            "bases": self._bases(),
            "sources": {extension.name: self._source(extension) for extension in extensions(self.stack)},
            **({"rootfs": self.before["rootfs"]} if "rootfs" in self.before else {}),
            **self._smi(),
            "wheels": self._wheels(path) if image else self.before.get("wheels", {}),
        }
        document["locked"] = not self.missing
        write_atomically(self.folder / "pins.json", (json.dumps(document, indent=2).encode() + b"\n",))
        return LockResult(missing=tuple(self.missing), kept=tuple(self.kept))

    def _resolve(self, wanted: Sequence[str], constraints: Sequence[str] = ()) -> str:
        held = indexes.Held(constraints=constraints, overrides=overrides(self.stack, wanted))
        if self.wheel_folder:
            return self.wheel_folder.resolve(wanted, python=self.stack.python, held=held)

        def question(places: Sequence[str]) -> str:
            return indexes.resolve(wanted, python=self.stack.python, places=places, held=held)

        return ask(self.stack, self.upstream, question)

    def _write(self, name: str, wanted: Sequence[str], make: Callable[[], str]) -> bool:
        """Write one lock; if that fails, an earlier one stays if it covers the same packages."""
        path = self.folder / f"{name}.lock"
        try:
            text = make()
        except (OutOfReachError, UnresolvedError) as error:
            if covers(path, wanted):
                self.kept.append(f"{path.name}: {error.what}")
            else:
                self.missing.append(error.what)
                path.unlink(missing_ok=True)
            return False
        index = f"{TORCH_INDEX}/{self.stack.wheel_tag}" if self.stack.wheel_tag else "not needed"
        head = _HEAD.format(what=_WHAT.get(name, name), index=index)
        if self.wheel_folder:
            head += "# The hashes are those of wheels in one folder (wheelhouse.json): an index has others.\n"
        write_atomically(path, ((head + text).encode(),))
        return True

    def _bases(self) -> dict[str, str | None]:
        found: dict[str, str | None] = {}
        for base in (self.stack.base, self.stack.builder):
            if base is None or base.reference is None:
                continue
            try:
                found[base.reference] = self.upstream.base_digest(base.reference)
            except OutOfReachError as error:
                found[base.reference] = base.digest
                known = self.kept if base.digest else self.missing
                known.append(f"no digest of {base.reference}: {error.what}")
        return found

    def _source(self, extension: Extension) -> Mapping[str, str | None]:
        """The file that a stage makes its wheel from: name and checksum."""
        found: dict[str, str] = {}

        def make() -> str:
            found.update(self._file(extension))
            ((_, sha256),) = found.items()
            return f"{extension.pin} \\\n    --hash=sha256:{sha256}\n"

        self._write(extension.name, (extension.pin,), make)
        entry = {"version": extension.version, "form": extension.form, "file": None, "sha256": None}
        for file, sha256 in found.items():
            return {**entry, "file": file, "sha256": sha256}
        kept = covers(self.folder / f"{extension.name}.lock", (extension.pin,))
        return self.before["sources"][extension.name] if kept else entry

    def _smi(self) -> Mapping[str, Any]:
        """The package with AMD's management library, by the hash that its archive's signed index states."""
        path = self.folder / f"{rocm.SMI}.sha256"
        if not rocm.takes_smi(self.stack):
            path.unlink(missing_ok=True)
            return {}
        try:
            self.upstream.reach(rocm.archive(self.stack))
            found = apt.find(rocm.source(self.stack, self.upstream.mirrors), rocm.SMI)
        except (ConfigurationError, EngineError) as error:
            # The lines of apt's message name the addresses of this site, so the first sentence alone is kept.
            before = self.before.get("debs", {}).get(rocm.SMI) or {}  # None: it was out of reach then too
            kept = before.get("archive") == rocm.archive(self.stack)
            known = self.kept if kept and path.is_file() else self.missing
            known.append(f"{rocm.SMI} of {rocm.archive(self.stack)}: {error.what}")
            if known is self.missing:
                path.unlink(missing_ok=True)
                return {"debs": {rocm.SMI: None}}
            return {"debs": self.before["debs"]}
        write_atomically(path, (f"{found.sha256}  {found.path}\n".encode(),))
        entry = {"archive": rocm.archive(self.stack), **dataclasses.asdict(found)}
        return {"debs": {rocm.SMI: {name: entry[name] for name in entry if name != "name"}}}

    def _file(self, extension: Extension) -> Mapping[str, str]:
        if extension.wheel:
            return {extension.wheel: self.upstream.wheel_sha256(extension.version, extension.wheel)}
        places = indexes.pip_places(find_links=True)
        found = indexes.files((extension.pin,), python=self.stack.python, places=places)
        archives = {
            name: sha256 for name, sha256 in found[extension.name].items() if not name.endswith(".whl")
        }
        if not archives:
            raise OutOfReachError(f"the indexes of this machine have no source archive of {extension.pin}")
        return archives

    def _wheels(self, path: Path) -> Mapping[str, Mapping[str, str]]:
        """The files that may serve as torch and what it is built on, by name."""
        locked = _of_image(path)
        names = [*(pin.partition("==")[0] for pin in self.stack.frozen), "torchao"]
        pins = [f"{name}=={locked[name][0]}" for name in names if name in locked]
        if self.wheel_folder:
            return {pin.partition("==")[0]: of for pin, of in self.wheel_folder.files(pins).items()}
        found = ask(
            self.stack,
            self.upstream,
            lambda places: indexes.files(pins, python=self.stack.python, places=places),
        )
        return {name: {f: s for f, s in of.items() if f.endswith(".whl")} for name, of in found.items()}


def ask(stack: Stack, upstream: Upstream, question: Callable[[Sequence[str]], _Answer]) -> _Answer:
    """Ask pip's own places and, if they lack something, also the index of those who built torch.

    Raises:
        UnresolvedError: A package is in no index of this machine.
        OutOfReachError: The place that has torch is out of reach.
    """
    places = indexes.pip_places(find_links=stack.wheels != "index")
    alone = indexes.NO_INDEX in places
    package = f"{stack.requirements[0]} as AMD builds it"
    # The index has a torch of the same number as AMD's, and it is built for CUDA.
    if stack.wheels != "amd":
        try:
            return question(places)
        except UnresolvedError as error:
            if alone or not torch_places(stack):
                raise
            package = error.package
    ((_, place),) = torch_places(stack)
    reason = upstream.answers(f"{place.rstrip('/')}/")
    if reason:
        raise OutOfReachError(f"{package} is in no index of this machine, and {place} is needed: {reason}")
    return question([*places, *(f"{option}={own}" for option, own in upstream.beside(stack, alone=alone))])


def _of_image(path: Path) -> Mapping[str, tuple[str, tuple[str, ...]]]:
    """The packages of the image: of its lock at this path, with what was chosen instead of some of them."""
    return {**indexes.read_lock(path), **indexes.read_lock(path.with_name(f"{CHOSEN}.lock"))}


def disagreements(stack: Stack, path: Path) -> list[str]:
    """Where the indexes resolved to other versions than the rules name: one of the two is wrong."""
    locked = {name: version for name, (version, _) in _of_image(path).items()}
    found = [
        f"the indexes give {name} {locked[name]}, the rules {version}"
        for name, version in (pin.split("==", 1) for pin in stack.frozen)
        if name in locked and _differs(stack, locked[name], version)
    ]
    if stack.wheels == "amd" and "rocm" not in locked.get("torch", "rocm"):
        found.append(f"the indexes give torch {locked['torch']}, which AMD did not build")
    return found


def _differs(stack: Stack, locked: str, version: str) -> bool:
    """Whether a locked version differs from the expected one, without the local part of AMD's wheels."""
    return (locked.partition("+")[0] if stack.wheels == "amd" else locked) != version


def covers(path: Path, wanted: Sequence[str]) -> bool:
    """Whether a lock is there and holds every requirement at its version."""
    locked = {canonicalize_name(name): version for name, (version, _) in indexes.read_lock(path).items()}
    for requirement in map(Requirement, wanted):
        found = locked.get(canonicalize_name(requirement.name))
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            return False
    return path.is_file()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Downloads:
    """How a user downloads the files of a lock by hand.

    Attributes:
        by_hand: A package that no index has as a wheel -> what `pip download` takes in place of a lock.
    """

    options: str  # pip's options that name the places of torch's makers
    by_hand: Mapping[str, str]


def downloads(stack: Stack) -> Downloads:
    """What the command takes that downloads the files of a stack's locks."""
    return Downloads(
        options="".join(f" {option}={place}" for option, place in torch_places(stack)),
        by_hand={one.name: one.pip_wants for one in extensions(stack)},
    )


class WheelFolder:
    """A folder of wheels; each file is read once.

    Raises:
        BuildError: The folder lacks a wheel of a requirement, or of a package that one needs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._hashes: dict[str, str] = {}

    def resolve(self, wanted: Sequence[str], *, python: str, held: indexes.Held = indexes.FREE) -> str:
        """A lock of the requirements and of all that they need, as pip reads it."""
        places = ["--no-index", f"--find-links={self.folder}"]
        try:
            text = indexes.resolve(wanted, python=python, places=places, held=held, with_hashes=False)
        except indexes.UnresolvedError as error:
            raise self._refusal(error.package, python) from error
        pins = re.findall(r"^[\w.-]+==\S+", text, re.MULTILINE)
        of = self.files(pins)
        entries = [
            " \\\n".join([pin, *(f"    --hash=sha256:{digest}" for digest in sorted(set(found.values())))])
            for pin, found in of.items()
        ]
        return "".join(f"{entry}\n" for entry in entries)

    def files(self, pins: Sequence[str]) -> Mapping[str, Mapping[str, str]]:
        """Pin -> file name -> SHA-256, of the folder's wheels of that name and version."""
        names = sorted(path.name for path in self.folder.glob("*.whl"))
        of = {pin: [name for name in names if read_packages(pin)[0].is_of(name)] for pin in pins}
        missing = [name for found in of.values() for name in found if name not in self._hashes]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self._hashes |= dict(
                zip(missing, pool.map(sha256_of, map(self.folder.joinpath, missing)), strict=True)
            )
        return {pin: {name: self._hashes[name] for name in found} for pin, found in of.items()}

    def _refusal(self, package: str, python: str) -> BuildError:
        return BuildError(
            "the folder of wheels lacks packages of the stack",
            where=str(self.folder),
            got=f"no wheel of {package} for Python {python}, or none of a package that it needs",
            expected="every package of the stack and all that they need, as wheels",
            next_step="copy into the folder the wheels that this command lists as absent: "
            f"stackcheck wheelhouse {self.folder} --from-environment PYTHON STACK",
        )
