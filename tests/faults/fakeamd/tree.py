"""A folder of kernel files as data. In: path -> entry. Out: the folder on disk."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Link:
    """A symbolic link; the target is a path below the same root."""

    target: str


@dataclass(frozen=True)
class Folder:
    """An empty folder, which libraries open and list."""


@dataclass(frozen=True)
class Fifo:
    """A file that never opens: opening it blocks forever, as with a wedged driver."""


@dataclass(frozen=True)
class Refusing:
    """A file that opens but whose reading fails: the sticky bit tells the shim to fail it with EINVAL, the
    group's sticky id with EPERM.
    """

    error: Literal["EINVAL", "EPERM"] = "EINVAL"


Entry = str | bytes | Link | Folder | Fifo | Refusing
Tree = dict[str, Entry]


def properties(values: Mapping[str, int | str]) -> str:
    """The KFD's form: one "name value" a line."""
    return "\n".join(f"{name} {value}" for name, value in values.items())


def write(root: Path, tree: Mapping[str, Entry]) -> None:
    """Make every entry below `root`. Text ends in one newline, as the kernel writes it."""
    for place, entry in tree.items():
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        match entry:
            case str():
                path.write_text(entry.rstrip("\n") + "\n", encoding="utf-8")
            case bytes():
                path.write_bytes(entry)
            case Link(target):
                path.symlink_to(_kernel_form(Path(target), Path(place).parent))
            case Folder():
                path.mkdir(exist_ok=True)
            case Fifo():
                os.mkfifo(path)
            case Refusing(error):
                path.touch()
                path.chmod(0o1444 if error == "EINVAL" else 0o3444)


def _kernel_form(target: Path, folder: Path) -> str:
    """As kernfs writes links: up to a folder above the target, so that the text ends in its name."""
    return os.path.join(os.path.relpath(target.parent, folder), target.name)  # noqa: PTH118
