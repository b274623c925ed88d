"""What an image declares and what is installed in it, told by files alone. In: nothing. Out: names, versions,
paths.

Nothing is imported or loaded: this runs in the pytest parent.
"""

import fnmatch
import functools
import importlib.machinery
import importlib.metadata
import json
import os
import re
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vendors import Device, software

DECLARATION = Path(os.environ.get("STACKCHECK_STACK_FILE", "/opt/stackcheck/stack.json"))
SITE = Path(sysconfig.get_path("purelib"))


def declaration() -> Mapping[str, Any] | None:
    """What the image says of itself; None for an image that says nothing."""
    if not DECLARATION.exists():
        return None
    content: dict[str, Any] = json.loads(DECLARATION.read_text(encoding="utf-8"))
    return content


def has_torch() -> bool:
    """Whether the image is to have a torch: one that declares none has none, any other has to."""
    declared = declaration()
    return declared is None or "torch" in declared["packages"]


def architectures(vendor: str, devices: Iterable[Device]) -> list[str]:
    """Those that the image declares, and those of this machine."""
    machine = [] if vendor == "cpu" else [device.arch for device in devices]
    return sorted({*(declaration() or {}).get("archs", ()), *machine})


def distributions(patterns: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions whose normalised name matches a pattern."""
    return [
        distribution
        for name, distribution in _distributions().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def holds(distribution: importlib.metadata.Distribution, path: str) -> bool:
    """Whether a file is one of a distribution's."""
    name = Path(path).name
    wanted = Path(path).resolve()
    return any(
        Path(str(distribution.locate_file(file))).resolve() == wanted
        for file in distribution.files or ()
        if file.name == name
    )


def files_of(stem: str, folders: Iterable[str]) -> list[Path]:
    """Files of a library under the site's packages and in the system's folders, links followed, each once."""
    found = [path for path in _shared_objects() if software.stem(path.name) == stem]
    for folder in folders:
        found += [path for path in Path(folder).glob(f"{stem}*.so*") if software.stem(path.name) == stem]
    return sorted({path.resolve() for path in found if path.is_file()})


def shared_objects_of(distribution: importlib.metadata.Distribution) -> list[Path]:
    """The compiled files of a distribution."""
    files = [file for file in distribution.files or () if ".so" in file.suffixes]
    return [Path(str(distribution.locate_file(file))) for file in files]


def lacking(
    library: software.Library, files: Sequence[Path], archs: Sequence[str], stack: software.Software
) -> list[str]:
    """What a library on disk lacks: itself, a part of it, code or kernel files for an architecture."""
    if not files:
        absent = library.needed and has_torch()
        return [f"{library.name}: there is no {library.stem}.so in this image"] if absent else []
    return [problem for file in files for problem in _lacking_at(library, file, archs, stack)]


def _lacking_at(
    library: software.Library, file: Path, archs: Sequence[str], stack: software.Software
) -> list[str]:
    beside = {stem: sorted(file.parent.glob(f"{stem}.so*")) for stem in library.parts}
    problems = [f"{file}: {stem}.so is not beside it" for stem, found in beside.items() if not found]
    if library.device_code:
        whole = {path: stack.architectures(path) for path in (file, *(p[0] for p in beside.values() if p))}
        coded = {path: held for path, held in whole.items() if held}
        if not coded:
            problems.append(f"{file}: it holds no device code")
        problems += [
            f"{path}: no code for {arch}; it has {' '.join(sorted(held))}"
            for path, held in coded.items()
            for arch in archs
            if not stack.covers(arch, held)
        ]
    if library.kernels:
        problems += [
            f"{file}: no kernel files for {arch} ({' or '.join(library.kernels)})"
            for arch in archs
            if not any(_matches(file.parent, pattern.format(arch=arch)) for pattern in library.kernels)
        ]
    return problems


def _matches(folder: Path, pattern: str) -> bool:
    while pattern.startswith("../"):
        folder, pattern = folder.parent, pattern.removeprefix("../")
    return any(True for _ in folder.glob(pattern))


def extensions() -> list[Path]:
    """Importable modules of compiled code, and torch's own libraries; not the plug-ins that others load."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    modules = [path for path in SITE.rglob("*.so") if path.name.endswith(suffixes)]
    return sorted(path for path in modules if not path.name.startswith("lib") or _is_core(path))


def torch_and_kin() -> set[str]:
    """torch, all that it requires, and what requires torch: normalised names of installed distributions."""
    needs = {name: _requirements(distribution) for name, distribution in _distributions().items()}
    found, waiting = set[str](), ["torch"]
    while waiting:
        name = waiting.pop()
        if name in needs and name not in found:
            found.add(name)
            waiting += needs[name]
    return found | {name for name, required in needs.items() if "torch" in required}


def owned_by(names: set[str], paths: Sequence[Path]) -> list[Path]:
    """Those of some files that belong to the named distributions."""
    owned = {
        Path(str(distribution.locate_file(file))).resolve()
        for name, distribution in _distributions().items()
        if name in names
        for file in distribution.files or ()
    }
    return [path for path in paths if path.resolve() in owned]


def _distributions() -> dict[str, importlib.metadata.Distribution]:
    return {_plain(item.metadata["Name"] or ""): item for item in importlib.metadata.distributions()}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(distribution: importlib.metadata.Distribution) -> set[str]:
    """Names that a distribution requires in any case; an extra is somebody else's wish."""
    lines = [line for line in distribution.requires or () if "extra ==" not in line]
    return {
        re.sub(r"[-_.]+", "-", match[0]).lower() for line in lines if (match := re.match(r"[\w.-]+", line))
    }


@functools.lru_cache(maxsize=1)
def _shared_objects() -> tuple[Path, ...]:
    return tuple(path for path in SITE.rglob("*.so*") if ".so" in path.suffixes)


def _is_core(path: Path) -> bool:
    return path.match("torch/lib/*.so") and path.name.startswith(("libtorch", "libc10"))
