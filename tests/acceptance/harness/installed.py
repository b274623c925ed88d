"""What an image declares, what is installed in it, and whether the libraries that loaded are the same.

In: files, and the versions that loaded libraries report. Out: names, versions, paths, problems in words.
Nothing is imported or loaded here.
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
    """The stack that the image declares; None for an image without a declaration."""
    if not DECLARATION.exists():
        return None
    content: dict[str, Any] = json.loads(DECLARATION.read_text(encoding="utf-8"))
    return content


def has_torch() -> bool:
    """Whether the image must have torch: always, unless its declaration lists no torch."""
    declared = declaration()
    return declared is None or "torch" in declared["packages"]


def architectures(vendor: str, devices: Iterable[Device], declared: Mapping[str, Any] | None) -> list[str]:
    """The architectures that an image declares, and those of this machine's devices."""
    machine = [] if vendor == "cpu" else [device.arch for device in devices]
    return sorted({*(declared or {}).get("archs", ()), *machine})


def distributions(patterns: Sequence[str]) -> list[importlib.metadata.Distribution]:
    """The installed distributions whose normalised name matches a pattern."""
    return [
        distribution
        for name, distribution in named_distributions().items()
        if any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
    ]


def holds(distribution: importlib.metadata.Distribution, path: str) -> bool:
    """Whether a file belongs to a distribution."""
    name = Path(path).name
    wanted = Path(path).resolve()
    return any(
        Path(str(distribution.locate_file(file))).resolve() == wanted
        for file in distribution.files or ()
        if file.name == name
    )


def files_of(stem: str, folders: Iterable[str]) -> list[Path]:
    """The files of a library in site-packages and in the system's folders; links followed, each file once."""
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
    """What a library on disk lacks: its file, one of its parts, or code or kernels for an architecture."""
    if not files:
        absent = library.needed and has_torch()
        return [f"{library.name}: {library.stem}.so is not in this image"] if absent else []
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
            problems.append(f"{file}: it holds no device code, and no file that it names does")
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


def problems_of_loaded(library: software.Library, entry: Mapping[str, Any] | None) -> list[str]:
    """How the library that loaded differs from what is declared or installed.

    Args:
        library: The library.
        entry: Its "file" and the "version" that it reports; None if it did not load.
    """
    if entry is None:
        absent = library.needed and has_torch()
        return [f"{library.name}: torch did not load {library.stem}.so"] if absent else []
    if library.version is None:
        return []
    if not isinstance(entry["version"], list):
        return [f"{entry['version']} ({entry['file']})"]
    loaded = f"{library.name}: {entry['file']} is {dotted(entry['version'])}"
    differences = [f"declared {text}" for text in _declared(library) if not agree(entry["version"], text)]
    return [f"{loaded}, {problem}" for problem in (*differences, *_of_wheels(library, entry))]


def agree(reported: Sequence[int], stated: str) -> bool:
    """Whether a version that a library reports equals the beginning of a stated one: 9.20.0 and 9.20.0.48."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[-+]", stated)[0])]
    shared = min(len(reported), len(numbers))
    return shared > 0 and list(reported)[:shared] == numbers[:shared]


def dotted(version: Sequence[int]) -> str:
    """The version as text, such as "2.29.7"."""
    return ".".join(map(str, version))


def _declared(library: software.Library) -> list[str]:
    content = declaration() or {}
    collective, release = content.get("collective") or {}, content.get("runtime_version") or ""
    wanted = {"collective": collective.get("version"), "runtime": ".".join(release.split(".")[:2])}
    version = wanted.get(library.declared or "")
    return [version] if version else []


def _of_wheels(library: software.Library, entry: Mapping[str, Any]) -> list[str]:
    found = distributions(library.wheels)
    named = [f"{item.metadata['Name']} {item.version}" for item in found]
    owners = [holds(item, entry["file"]) for item in found]
    if found and not any(owners):
        return [f"and this file does not belong to {', '.join(named)}"]
    return [
        f"installed {name}"
        for item, name, owns in zip(found, named, owners, strict=True)
        if owns and not agree(entry["version"], item.version)
    ]


def extensions() -> list[Path]:
    """Compiled modules that Python can import, and torch's own libraries; not plug-ins of other programs."""
    suffixes = tuple(importlib.machinery.EXTENSION_SUFFIXES)
    modules = [path for path in SITE.rglob("*.so") if path.name.endswith(suffixes)]
    core = {path for path in SITE.glob("torch/lib/*.so") if path.name.startswith(("libtorch", "libc10"))}
    return sorted(path for path in modules if not path.name.startswith("lib") or path in core)


def torch_and_kin() -> set[str]:
    """Normalised names of torch, of all that torch requires, and of the distributions that require torch."""
    needs = {name: _requirements(distribution) for name, distribution in named_distributions().items()}
    found, waiting = set[str](), ["torch"]
    while waiting:
        name = waiting.pop()
        if name in needs and name not in found:
            found.add(name)
            waiting += needs[name]
    return found | {name for name, required in needs.items() if "torch" in required}


def owned_by(names: set[str], paths: Sequence[Path]) -> list[Path]:
    """The files among `paths` that belong to the named distributions."""
    owned = {
        Path(str(distribution.locate_file(file))).resolve()
        for name, distribution in named_distributions().items()
        if name in names
        for file in distribution.files or ()
    }
    return [path for path in paths if path.resolve() in owned]


def named_distributions() -> dict[str, importlib.metadata.Distribution]:
    """Every installed distribution that has a name, by its normalised name."""
    found = importlib.metadata.distributions()
    return {_plain(item.metadata["Name"]): item for item in found if item.metadata["Name"]}


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _requirements(distribution: importlib.metadata.Distribution) -> set[str]:
    """Normalised names that a distribution always requires; requirements of extras are optional."""
    lines = [line for line in distribution.requires or () if "extra ==" not in line]
    return {_plain(match[0]) for line in lines if (match := re.match(r"[\w.-]+", line))}


@functools.lru_cache(maxsize=1)
def _shared_objects() -> tuple[Path, ...]:
    return tuple(path for path in SITE.rglob("*.so*") if ".so" in path.suffixes)
