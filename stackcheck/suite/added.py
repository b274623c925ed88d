"""What an image's own layers add to the image below, and whether a check can see it.

In: a layout whose first layers are those of the image below. Out: `Added`. An addition is apart if nothing of
the image below can come to it: a new folder at the top, or a new package, each under a name that no byte of
the layers below, no file of the suites and no variable has. All else can have changed any check.
"""

from __future__ import annotations

import configparser
import contextlib
import dataclasses
import functools
import posixpath
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stackcheck.errors import ConfigurationError
from stackcheck.oci import filesystem
from stackcheck.oci.documents import json_object
from stackcheck.oci.filesystem import Hashing, Node, Tree
from stackcheck.oci.layout import OciLayout

PYTHONS = sys.stdlib_module_names | {"sitecustomize", "usercustomize", "__pycache__"}
OURS = ("tests", "trainers")  # of the frozen suites, what runs in the image
# Settings that no check sees: the suites start the image's Python in a folder of their own.
UNSEEN = ("Cmd", "WorkingDir", "ExposedPorts", "StopSignal", "Labels")
# Folders at the top that programs know without being told.
_SYSTEM = re.compile(
    "/(bin|boot|dev|etc|home|lib|lib32|lib64|libx32|media|mnt|nix|opt|proc|root|run|sbin|snap|srv|stackcheck"
    "|sys|tmp|usr|var)"
)
_SITE = re.compile(r"(/.*?/(?:site|dist)-packages)/([^/]+)(/.*)?")
_IN_PYTHON = re.compile(r"/((?:site|dist)-packages|python3(?:\.\d+)?|lib-dynload)/[^/]+$")
_PROGRAM = re.compile(r"((?:/usr|/usr/local|/opt/[^/]+)?/bin)/([\w.-]+)")
_MODULE = re.compile(r"([A-Za-z_]\w*)(?:\.py)?")
_DIST_INFO = re.compile(r"(\w[\w.]*)-[^/-]+\.dist-info")
# How programs name a folder or a package: in quotes, as a string of C, after an equals sign, or in an import.
# Prose is none of these. A program may stand anywhere in a command: each word counts.
_FOLDER_NAME = r"""(["'\0=`]|\n[ \t]*|["'\0=:]/(?!/)[\w./-]*:|^)$""", r"(?![\w-])"
_WORD = r"(^|[^\w-])$", r"(?![\w-])"
_PACKAGE_NAME = (
    r"""(["'\0]|=[ \t]*|(^|[^\w.])(from[ \t]+|import[ \t]+([\w.]+([ \t]+as[ \t]+\w+)?[ \t]*,[ \t]*)*))$""",
    r"""(?=["'.:\[=<>!~@;,\s\0)\\]|$)""",
)
BIN = "bin/"  # begins the name of a program
REACH = 120  # bytes before a name that are looked at
_ENTRY_POINTS = "/entry_points.txt"
_COMMANDS = {"console_scripts", "gui_scripts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Added:
    """What the layers on top bring."""

    layers: int  # how many layers there are below
    paths: int = 0  # how many paths they add, change or remove
    names: tuple[str, ...] = ()  # the names under which a program could come to them
    seen: str = ""  # why a check can have changed; empty if none can


def look(layout: Path, digest: str, below: Mapping[str, Any], suites: Path) -> Added:
    """Compare an image with the one below it; the frozen suites must not name what was added either.

    Raises:
        ConfigurationError: The image was not made from the one below.
        RegistryError: The layout is damaged.
    """
    config = config_of(layout, digest)
    expected = [str(each) for each in below["rootfs"]["diff_ids"]]
    count = len(expected)
    _require_below(config["rootfs"]["diff_ids"][:count], expected, layout)
    if why := _other_settings(config, below):
        return Added(layers=count, seen=why)
    before, tree = filesystem.read_from(layout, digest, _wanted, count)
    paths = sorted(_touched(before, tree, count))
    modules = PYTHONS | _modules(before)
    for path in paths:
        if why := _reach(path, before, tree, modules):
            return Added(layers=count, paths=len(paths), seen=f"{path} {why}")
    if link := next(_links_to(frozenset(paths), before, tree), None):
        return Added(layers=count, paths=len(paths), seen=f"the link {link} leads to what was added")
    names = {name: Spelling.of(name) for name in sorted({_name(path) for path in paths})}
    named, digests = filesystem.search(layout, digest, functools.partial(_named, names=names), count)
    _require_below(digests, expected, layout)
    texts = [path.read_bytes() for name in OURS for path in (suites / name).rglob("*") if path.is_file()]
    texts.append("\n".join(map(str, config.get("config", {}).get("Env") or ())).encode())
    named |= {word for text in texts for word in _named(text, names)}
    seen = f"the image below or the suites have the name {', '.join(sorted(named))}" if named else ""
    return Added(layers=count, paths=len(paths), names=tuple(names), seen=seen)


def _require_below(found: list[str], expected: list[str], layout: Path) -> None:
    if found != expected:
        raise ConfigurationError(
            "the image was not made from this one: its first layers are others",
            where=str(layout),
            got=", ".join(digest[:19] for digest in found) or "no layer",
            expected=", ".join(digest[:19] for digest in expected),
            next_step="build it FROM the digest that `stackcheck verify` prints, or leave --derived-from out",
        )


def config_of(layout: Path, digest: str) -> dict[str, Any]:
    """The config of an image in a layout."""
    store = OciLayout(layout)
    named = json_object(store.read_manifest(digest).body, digest)["config"]["digest"]
    return json_object(b"".join(store.read_blob(named)), named)


def _other_settings(config: Mapping[str, Any], below: Mapping[str, Any]) -> str:
    """Which setting differs, of those that a check could see; empty if none does."""
    for one, other in ((config, below), (_settings(config), _settings(below))):
        for name in sorted({*one, *other} - {"config", "created", "history", "rootfs", *UNSEEN}):
            if (one.get(name) or None) != (other.get(name) or None):
                return f"its setting {name} is another"
    return ""


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    return dict(config.get("config") or {})


def _wanted(path: str) -> Hashing:
    return Hashing(body=path.endswith(f".dist-info{_ENTRY_POINTS}"))


def _touched(before: Mapping[str, Node], tree: Tree, count: int) -> Iterator[str]:
    """What the layers from `count` on add, change or remove; a folder that only holds it is not changed."""
    yield from (path for path in before if path not in tree.entries)
    for path, entry in tree.entries.items():
        old = before.get(path)
        same = old and old.kind == entry.kind == "folder" and old.rights == entry.rights
        if entry.layer >= count and not same:
            yield path


def _links_to(paths: frozenset[str], before: Mapping[str, Node], tree: Tree) -> Iterator[str]:
    """The links of the image below that lead to one of these paths now."""
    for path, entry in before.items():
        if entry.kind == "link":
            with contextlib.suppress(ValueError):  # a circle leads nowhere
                if tree.real(path) in paths:
                    yield path


def _reach(path: str, before: Mapping[str, Node], tree: Tree, modules: frozenset[str]) -> str:
    """Why a program of the image below could come to a path; empty if it would have to know its name."""
    entry = tree.entries.get(path)
    if path in before or entry is None:
        return "was changed or removed"
    if entry.kind not in {"file", "folder"} or entry.privileged or entry.elf:
        return "is a program, a library, a link, or has rights of its own"
    if found := _SITE.fullmatch(path):
        if found[1] not in before:
            return "is in a new folder of packages"
        return _reach_in_site(path, found[2], tree, modules)
    program = _PROGRAM.fullmatch(path)
    if program and program[1] in before and entry.kind == "file":
        return ""
    top = "/" + path.split("/")[1]
    return "is in a folder that programs look into" if _SYSTEM.fullmatch(top) or top in before else ""


def _reach_in_site(path: str, top: str, tree: Tree, modules: frozenset[str]) -> str:
    """The same of a path beside the packages of the image below."""
    if path.endswith(_ENTRY_POINTS) and not _only_commands(tree.bodies.get(path, b"")):
        return "registers a plug-in"
    module = _MODULE.fullmatch(top)
    if module and module[1] in modules:
        return "has a name that is imported already"
    return "" if module or _DIST_INFO.fullmatch(top) else "is read when Python starts, or is no package"


def _modules(before: Mapping[str, Node]) -> frozenset[str]:
    """The names of all modules of the image below, in whatever folder."""
    return frozenset(posixpath.basename(path).partition(".")[0] for path in before if _IN_PYTHON.search(path))


def _only_commands(body: bytes) -> bool:
    parser = configparser.ConfigParser(delimiters=("=",), strict=False, interpolation=None)
    try:
        parser.read_string(body.decode())
    except (configparser.Error, UnicodeDecodeError):
        return False
    return _COMMANDS.issuperset(parser.sections()) and not parser.defaults()


def _name(path: str) -> str:
    """The name under which a program could come to a path: of a package, of a program, or a folder."""
    if found := _SITE.fullmatch(path):
        package = _DIST_INFO.fullmatch(found[2])
        return package[1] if package else found[2].removesuffix(".py")
    program = _PROGRAM.fullmatch(path)
    return f"{BIN}{program[2]}" if program else "/" + path.split("/")[1]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """How a program names something, in small letters."""

    part: bytes  # bytes without which it is not there: they are found quickly
    whole: re.Pattern[bytes]  # the name and what may follow it
    before: re.Pattern[bytes]  # what may stand before it

    @classmethod
    def of(cls, name: str) -> Spelling:
        """The spellings of a folder (it begins with a slash), of a package or of a program."""
        kind = _FOLDER_NAME if name.startswith("/") else _WORD if name.startswith(BIN) else _PACKAGE_NAME
        low = name.removeprefix(BIN).lower()
        text = "[-_.]+".join(map(re.escape, re.split(r"[-_.]+", low)))
        part = max(re.split(r"\W|_", low), key=len)
        return cls(part.encode(), re.compile(f"{text}{kind[1]}".encode()), re.compile(kind[0].encode()))

    def is_in(self, text: bytes) -> bool:
        """Whether a text, in small letters, names it."""
        return self.part in text and any(
            self.before.search(text, max(0, found.start() - REACH), found.start())
            for found in self.whole.finditer(text)
        )


def _named(text: bytes, names: Mapping[str, Spelling]) -> list[str]:
    low = text.lower()
    return [name for name, spelling in names.items() if spelling.is_in(low)]
