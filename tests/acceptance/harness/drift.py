"""Whether a loaded library is the declared and the installed one. In: what it told. Out: problems."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from harness import installed
from vendors.software import Library


def of(library: Library, entry: Mapping[str, Any] | None) -> list[str]:
    """In which ways a library is not what was declared or installed; `entry` is its file and version."""
    if entry is None:
        absent = library.needed and installed.has_torch()
        return [f"{library.name}: torch did not load {library.stem}.so"] if absent else []
    if library.version is None:
        return []
    if not isinstance(entry["version"], list):
        return [f"{entry['version']} ({entry['file']})"]
    told = f"{library.name}: {entry['file']} is {dotted(entry['version'])}"
    drift = [f"declared {text}" for text in _declared(library) if not agree(entry["version"], text)]
    return [f"{told}, {problem}" for problem in (*drift, *_of_wheels(library, entry))]


def agree(told: Sequence[int], stated: str) -> bool:
    """Whether the numbers that a library tells are those that a version begins with: 9.20.0, 9.20.0.48."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[-+]", stated)[0])]
    shared = min(len(told), len(numbers))
    return shared > 0 and list(told)[:shared] == numbers[:shared]


def same_release(found: str, declared: str) -> bool:
    """Whether major and minor agree: the patch of a runtime is the wheel's own affair, cu130 is 13.0."""
    return _short(found) == _short(declared)


def dotted(version: Sequence[int]) -> str:
    """2.29.7."""
    return ".".join(map(str, version))


def _declared(library: Library) -> list[str]:
    content = installed.declaration() or {}
    collective, release = content.get("collective") or {}, content.get("runtime_version")
    wanted = {"collective": collective.get("version"), "runtime": _short(release) if release else None}
    version = wanted.get(library.declared or "")
    return [version] if version else []


def _of_wheels(library: Library, entry: Mapping[str, Any]) -> list[str]:
    found = installed.distributions(library.wheels)
    named = [f"{item.metadata['Name']} {item.version}" for item in found]
    owners = [installed.holds(item, entry["file"]) for item in found]
    if found and not any(owners):
        return [f"and not a file of {', '.join(named)}"]
    return [
        f"installed {name}"
        for item, name, owns in zip(found, named, owners, strict=True)
        if owns and not agree(entry["version"], item.version)
    ]


def _short(release: str) -> str:
    return ".".join(release.split(".")[:2])
