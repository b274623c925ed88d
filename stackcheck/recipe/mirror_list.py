"""Exactly which files a site has to copy for a stack: wheels, archives, packages, images, keys.

In: a stack, its committed locks, the indexes that can be asked. Out: one `WantedFiles` a file, with its
public place, and its size and hash as far as they are known. Nothing is downloaded. A file whose name no
index tells here is listed by its package, version and hashes, with the reason.
"""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from packaging.utils import canonicalize_name

from stackcheck.matrix.stack import Stack
from stackcheck.recipe import extensions, indexes, lock, rocm
from stackcheck.recipe.indexes import IndexFile, UnresolvedError
from stackcheck.recipe.upstream import OutOfReachError, Upstream, torch_places

Best = Callable[[Iterable[str]], str | None]

Kind = Literal["wheel", "source", "image", "deb", "apt", "key"]
PACKAGE_INDEX = "the package index"
_LOCKS = ("requirements.lock", "toolchain.lock", "chosen.lock")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WantedFiles:
    """One file, image or set of distribution packages."""

    kind: Kind
    name: str  # the file's name; a package and version where no index tells it; an image; names of packages
    place: str  # where it is published
    size_bytes: int | None = None
    sha256: tuple[str, ...] = ()  # of the file, or an image's digest; several where one of them is the file's
    note: str = ""  # what is not known, and why


def wanted(stack: Stack, images: Path, upstream: Upstream, best: Best) -> tuple[WantedFiles, ...]:
    """What a site copies for one stack; `images` holds its locks, `best` chooses a file as pip would."""
    folder = images / stack.id
    pins = json.loads((folder / "pins.json").read_text("utf-8")) if (folder / "pins.json").is_file() else {}
    found = [*_of_indexes(stack, folder, upstream, best), *_sources(stack, pins), *_images(stack)]
    return (*found, *_of_archives(stack, pins))


def _of_indexes(stack: Stack, folder: Path, upstream: Upstream, best: Best) -> Iterator[WantedFiles]:
    locked: dict[str, tuple[str, tuple[str, ...]]] = {}
    for name in reversed(_LOCKS):
        locked |= indexes.read_lock(folder / name)
    if not (folder / _LOCKS[0]).is_file():
        yield from _unlocked(stack)
        return
    asked, silent = _ask(stack, upstream, [f"{name}=={version}" for name, (version, _) in locked.items()])
    for name, (version, hashes) in sorted(locked.items()):
        known = {value.removeprefix("sha256:") for value in hashes}
        files = [one for one in asked.get(name, ()) if one.sha256 in known]
        taken = best(one.name for one in files)
        chosen = next((one for one in files if one.name == taken), None)
        if chosen is None:
            note = silent or "no index of this machine lists a file of it that fits"
            yield WantedFiles(
                kind="wheel",
                name=f"{name}=={version}",
                place=_place(stack, name, None, upstream),
                sha256=tuple(sorted(known)),
                note=note,
            )
            continue
        yield WantedFiles(
            kind="wheel" if chosen.name.endswith(".whl") else "source",
            name=chosen.name,
            place=_place(stack, name, chosen.index, upstream),
            size_bytes=chosen.size_bytes,
            sha256=(chosen.sha256,),
        )


def _unlocked(stack: Stack) -> Iterator[WantedFiles]:
    """The direct requirements alone, and what the rules name."""
    pinned = tuple(dict.fromkeys((*stack.requirements, *stack.frozen)))
    names = {pin.partition("==")[0] for pin in pinned}
    asked = (
        *pinned,
        *(need for need in (*extensions.needs(stack), *extensions.toolchain(stack)) if need not in names),
    )
    note = f"not locked: what it requires is not known before `stackcheck lock {stack.id}` has run"
    for pin in dict.fromkeys(asked):
        yield WantedFiles(
            kind="wheel", name=pin, place=_place(stack, pin.partition("==")[0], None, None), note=note
        )


def _ask(
    stack: Stack, upstream: Upstream, pins: Sequence[str]
) -> tuple[Mapping[str, tuple[IndexFile, ...]], str]:
    """The files of packages by name, and why there are none."""
    try:
        found = lock.ask(
            stack, upstream, lambda places: indexes.listed(pins, python=stack.python, places=places)
        )
    except (OutOfReachError, UnresolvedError) as error:
        return {}, f"the file's name is not known here: {error.what}"
    return {canonicalize_name(name): files for name, files in found.items()}, ""


def _place(stack: Stack, name: str, index: str | None, upstream: Upstream | None) -> str:
    """The public place of a package: torch's makers', or the package index."""
    ((_, own),) = torch_places(stack) or (("", ""),)
    if index is not None and upstream is not None:
        return own if own and index.startswith(upstream.mirrors.url(own).rstrip("/")) else PACKAGE_INDEX
    of_makers = {"torch", *((stack.triton.name,) if stack.triton else ())}
    return own if own and name in of_makers else PACKAGE_INDEX


def _sources(stack: Stack, pins: Mapping[str, Any]) -> Iterator[WantedFiles]:
    for extension in extensions.extensions(stack):
        entry = pins.get("sources", {}).get(extension.name) or {}
        place = extension.releases if extension.wheel else PACKAGE_INDEX
        yield WantedFiles(
            kind="wheel" if extension.wheel else "source",
            name=entry.get("file") or extension.wheel or extension.pin,
            place=place,
            sha256=(entry["sha256"],) if entry.get("sha256") else (),
            note="" if entry.get("file") else "not locked",
        )


def _images(stack: Stack) -> Iterator[WantedFiles]:
    for base in (stack.base, stack.builder):
        if base and base.reference:
            yield WantedFiles(
                kind="image",
                name=base.reference,
                place="docker.io",
                sha256=(base.digest.removeprefix("sha256:"),) if base.digest else (),
                note="" if base.digest else "no digest is known before it is locked",
            )


def _of_archives(stack: Stack, pins: Mapping[str, Any]) -> Iterator[WantedFiles]:
    """Distribution packages, and AMD's."""
    packages = [*stack.base.packages, *str(extensions.template_values(stack)["toolchain_packages"]).split()]
    with_needs = "with the packages that they depend on"
    if packages:
        release = stack.base.suite or stack.os
        names = " ".join(dict.fromkeys(packages))
        yield WantedFiles(kind="apt", name=names, place=f"the archive of {release}", note=with_needs)
    if not rocm.takes_smi(stack):
        return
    place = f"{rocm.archive(stack)} {rocm.suite(stack)} main"
    entry = (pins.get("debs") or {}).get(rocm.SMI)
    if entry:
        yield WantedFiles(
            kind="deb",
            name=entry["path"],
            place=place,
            size_bytes=entry["size_bytes"],
            sha256=(entry["sha256"],),
        )
    else:
        yield WantedFiles(kind="deb", name=rocm.SMI, place=place, note="not locked")
    if rocm.takes_runtime(stack):
        yield WantedFiles(kind="apt", name=" ".join(rocm.RUNTIME), place=place, note=with_needs)
    yield WantedFiles(kind="key", name=rocm.KEY_ADDRESS.rpartition("/")[2], place=rocm.KEY_ADDRESS)
