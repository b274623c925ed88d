"""The files of an image, read from its layers. In: a layout. Out: a `Tree`; nothing is unpacked.

Each layer's tar is read once, in the engine's order, so that later layers replace and remove what earlier
ones had: https://github.com/opencontainers/image-spec/blob/main/layer.md. A tar that two readers could
understand in two ways is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import hashlib
import io
import posixpath
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Literal, cast

import zstandard
from typing_extensions import Buffer

from stackcheck.oci.documents import CHUNK_BYTES, RegistryError, json_object
from stackcheck.oci.layout import OciLayout

Kind = Literal["file", "link", "folder", "device", "other"]
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
ATTRIBUTE = "SCHILY.xattr."
CAPABILITY = f"{ATTRIBUTE}security.capability"
MOST_LINKS = 40  # as the kernel
MOST_ENTRIES = 5_000_000
LONGEST_BODY = 64 << 20
LONGEST_HEADER = 1 << 20
LONGEST_WORD = 512  # that `search` finds where two pieces of a layer meet
SPECIAL_BITS = 0o6000  # setuid, setgid
_HEADERS = {tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE, b"L", b"K"}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A path of an image.

    Attributes:
        privileged: Whether it runs with other rights than its caller's: setuid, setgid or a capability.
        sums: Algorithm -> hexadecimal sum, of the files that `read` was asked for.
    """

    kind: Kind
    layer: int  # the number of the layer that has it, from 0
    privileged: bool = False
    target: str = ""  # of a link, as it is written there
    elf: bool = False  # whether it is a program or a library
    rights: tuple[object, ...] = ()  # mode, user, group and extended attributes
    sums: tuple[tuple[str, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Hashing:
    """What `read` shall do with the content of a path."""

    sums: tuple[str, ...] = ()  # the algorithms of the sums
    body: bool = False  # whether to keep the content
    elf_only: bool = False  # whether the sums are wanted of programs and libraries alone


class Tree:
    """The files of an image by their real paths: no folder on the way is a link.

    Attributes:
        first: What the first layer that had a file had there, whatever later layers did with it.
        first_links: The same for links.
        folders: Every path that was a folder in some layer.
    """

    def __init__(self) -> None:
        self.first: dict[str, Node] = {}
        self.first_links: dict[str, Node] = {}
        self.folders: set[str] = set()
        self.entries: dict[str, Node] = {"/": Node(kind="folder", layer=0)}
        self.bodies: dict[str, bytes] = {}
        self._children: dict[str, set[str]] = {}

    def real(self, path: str, *, last: bool = True) -> str:
        """A path with its links followed; with `last` false, all but the last part.

        Raises:
            ValueError: The links lead in a circle.
        """
        place, waiting, links = "/", [part for part in reversed(path.split("/")) if part not in {"", "."}], 0
        while waiting:
            part = waiting.pop()
            if part == "..":
                place = posixpath.dirname(place)
                continue
            inner = posixpath.join(place, part)
            entry = self.entries.get(inner)
            if entry is None or entry.kind != "link" or not (waiting or last):
                place = inner
                continue
            links += 1
            if links > MOST_LINKS:
                raise ValueError(f"too many links on the way to {path}")
            if entry.target.startswith("/"):
                place = "/"
            waiting += [part for part in reversed(entry.target.split("/")) if part not in {"", "."}]
        return place

    def below(self, folder: str) -> Iterator[str]:
        """Every path below a folder."""
        for name in self._children.get(folder, ()):
            path = posixpath.join(folder, name)
            yield path
            yield from self.below(path)

    def put(self, path: str, entry: Node, body: bytes | None = None) -> None:
        """Place an entry, in place of what was there; a folder keeps its content where it stays a folder."""
        before = self.entries.get(path)
        if before and not (before.kind == entry.kind == "folder"):
            self.remove(path)
        if len(self.entries) >= MOST_ENTRIES:
            raise ValueError(f"more than {MOST_ENTRIES} paths")
        folder, name = posixpath.split(path)
        if folder not in self.entries:
            self.put(folder, Node(kind="folder", layer=entry.layer))
        if self.entries[folder].kind != "folder":
            raise ValueError(f"a path below a file: {path}")
        self._children.setdefault(folder, set()).add(name)
        self.entries[path] = entry
        if entry.kind == "file":
            self.first.setdefault(path, entry)
        elif entry.kind == "link":
            self.first_links.setdefault(path, entry)
        elif entry.kind == "folder":
            self.folders.add(path)
        if body is not None:
            self.bodies[path] = body

    def remove(self, path: str, *, newer_than: int | None = None) -> None:
        """Take a path away, and all below it; `newer_than`: a layer whose own entries must not be there."""
        for gone in [path, *self.below(path)]:
            entry = self.entries.pop(gone, None)
            if entry and newer_than is not None and entry.layer >= newer_than and entry.kind != "folder":
                raise ValueError(f"one layer has and removes {gone}")
            self.bodies.pop(gone, None)
            self._children.pop(gone, None)
        folder, name = posixpath.split(path)
        self._children.get(folder, set()).discard(name)


def read(layout: Path, digest: str, wanted: Callable[[str], Hashing]) -> Tree:
    """The files of an image; `wanted` says what to do with the content of a regular file, by its path.

    Raises:
        RegistryError: The layout is damaged, or a layer cannot be read in one way only.
    """
    return read_from(layout, digest, wanted, 0)[1]


def read_from(
    layout: Path, digest: str, wanted: Callable[[str], Hashing], count: int
) -> tuple[Mapping[str, Node], Tree]:
    """What the first `count` layers of an image have, and the files of the whole image; as `read`."""
    store, tree = OciLayout(layout), Tree()
    below = dict(tree.entries)
    for number, name in enumerate(_layers(store, digest)):
        with _unpacked(store, name) as stream:
            _add(tree, number, stream, wanted, where=store.blob_path(name))
        below = dict(tree.entries) if number + 1 == count else below
    return below, tree


def search(
    layout: Path, digest: str, look: Callable[[bytes], Iterable[str]], count: int
) -> tuple[set[str], list[str]]:
    """What `look` finds in the first `count` layers, also in names and targets of links, and their digests.

    It finds words in a piece of a layer; the next piece begins with the last bytes of the one before. The
    digests are of the layers as they are unpacked, which the image's config names.

    Raises:
        RegistryError: The layout is damaged.
    """
    store, found, digests = OciLayout(layout), set[str](), []
    for name in _layers(store, digest)[:count]:
        whole, rest = hashlib.sha256(), b""
        with _unpacked(store, name) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                whole.update(chunk)
                found.update(look(rest + chunk))
                rest = chunk[-LONGEST_WORD:]
        digests.append(f"sha256:{whole.hexdigest()}")
    return found, digests


def _layers(store: OciLayout, digest: str) -> list[str]:
    manifest = json_object(store.read_manifest(digest).body, digest)
    return [str(layer["digest"]) for layer in manifest["layers"]]


def read_tar(path: Path, wanted: Callable[[str], Hashing]) -> Tree:
    """The files of one tar, as if an image had this layer alone.

    Raises:
        RegistryError: It cannot be read in one way only.
    """
    tree = Tree()
    with path.open("rb") as stream:
        _add(tree, 0, stream, wanted, where=path)
    return tree


@contextlib.contextmanager
def _unpacked(store: OciLayout, digest: str) -> Iterator[IO[bytes]]:
    """The tar of a layer, as a stream. After the last byte the blob has been compared with its digest."""
    with store.blob_path(digest).open("rb") as file:
        magic = file.read(4)
    packed = cast("IO[bytes]", io.BufferedReader(_Blob(store.read_blob(digest)), CHUNK_BYTES))
    stream = _decompressed(packed, magic)
    try:
        yield stream
        for rest in (stream, packed):
            while rest.read(CHUNK_BYTES):
                pass
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise RegistryError(
            "a layer of the image cannot be decompressed",
            where=str(store.blob_path(digest)),
            got=str(error),
            expected="a whole layer",
        ) from error


def _decompressed(packed: IO[bytes], magic: bytes) -> IO[bytes]:
    """What a layer's blob has in it, by its first bytes."""
    if magic.startswith(b"\x28\xb5\x2f\xfd"):
        plain = zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)
        return io.BufferedReader(cast("io.RawIOBase", plain), CHUNK_BYTES)
    if magic.startswith(b"\x1f\x8b"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=packed))
    return packed


class _Blob(io.RawIOBase):
    """Pieces of a blob as a file."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._rest = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Buffer) -> int:
        """As `io.RawIOBase.readinto`."""
        place = memoryview(buffer)
        while not self._rest:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(place), len(self._rest))
        place[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


class _Header(tarfile.TarInfo):
    """A header of a tar. Python ends quietly at one that it does not understand; the engine may read on."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        try:
            found = super().frombuf(buf, encoding, errors)
        except tarfile.InvalidHeaderError as error:  # type: ignore[attr-defined]  # not in typeshed
            raise tarfile.ReadError(f"a damaged header: {error}") from error
        if found.type in _HEADERS and found.size > LONGEST_HEADER:
            raise tarfile.ReadError(f"a header of {found.size} bytes")
        return found


def _add(tree: Tree, layer: int, stream: IO[bytes], wanted: Callable[[str], Hashing], *, where: Path) -> None:
    try:
        _add_members(tree, layer, stream, wanted)
    except (tarfile.TarError, ValueError, OverflowError, RecursionError) as error:
        raise RegistryError(
            "a layer of the image cannot be read",
            where=str(where),
            got=str(error)[:300],
            expected="a tar that every reader understands in the same way",
            next_step="build the image again with BuildKit",
        ) from error


def _add_members(tree: Tree, layer: int, stream: IO[bytes], wanted: Callable[[str], Hashing]) -> None:
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK_BYTES, tarinfo=_Header) as tar:
        for member in tar:
            tar.members = []  # type: ignore[attr-defined]  # else it keeps each of them
            path = _place(tree, member.name)
            folder, name = posixpath.split(path)
            if name == OPAQUE:
                for gone in [*tree.below(folder)]:
                    entry = tree.entries.get(gone)
                    if entry and entry.layer < layer:
                        tree.remove(gone, newer_than=layer)
            elif name.startswith(WHITEOUT):
                tree.remove(posixpath.join(folder, name.removeprefix(WHITEOUT)), newer_than=layer)
            elif path != "/":
                tree.put(path, *_entry(tree, layer, member, tar, wanted(path)))


def _place(tree: Tree, name: str) -> str:
    if ".." in name.split("/") or "\0" in name:
        raise ValueError(f"a path that leads out of its folder: {name!r}")
    return tree.real(posixpath.normpath(f"/{name.lstrip('/')}"), last=False)


def _entry(
    tree: Tree, layer: int, member: tarfile.TarInfo, tar: tarfile.TarFile, wanted: Hashing
) -> tuple[Node, bytes | None]:
    privileged = bool(member.mode & SPECIAL_BITS) or CAPABILITY in member.pax_headers
    attributes = sorted(item for item in member.pax_headers.items() if item[0].startswith(ATTRIBUTE))
    rights = (member.mode, member.uid, member.gid, *attributes)
    if member.isdir():
        return Node(
            kind="folder", layer=layer, rights=rights
        ), None  # setgid of a folder is about new files' groups
    if member.issym():
        return Node(kind="link", layer=layer, target=member.linkname), None
    if member.islnk():
        other = _place(tree, member.linkname)
        if other not in tree.entries:
            raise ValueError(f"a hard link to a file that is not there: {other}")
        return dataclasses.replace(tree.entries[other], layer=layer), tree.bodies.get(other)
    if member.ischr() or member.isblk():
        return Node(kind="device", layer=layer), None
    if not member.isreg():
        return Node(kind="other", layer=layer), None
    elf, sums, body = _content(cast("IO[bytes]", tar.extractfile(member)), member.size, wanted)
    node = Node(kind="file", layer=layer, privileged=privileged, elf=elf, rights=rights, sums=sums)
    return node, body


def _content(
    file: IO[bytes], size: int, wanted: Hashing
) -> tuple[bool, tuple[tuple[str, str], ...], bytes | None]:
    """Whether a file is a program or library; its sums and its content as far as they are wanted."""
    if wanted.body and size > LONGEST_BODY:
        raise ValueError(f"a record of {size} bytes")
    start = file.read(min(size, CHUNK_BYTES)) if size else b""
    elf = start.startswith(b"\x7fELF")
    kept = [start] if wanted.body else []
    hashes = [hashlib.new(name, start, usedforsecurity=False) for name in wanted.sums]
    if wanted.elf_only and not elf:
        hashes = []
    while (hashes or wanted.body) and (chunk := file.read(CHUNK_BYTES)):
        for each in hashes:
            each.update(chunk)
        if wanted.body:
            kept.append(chunk)
    return elf, tuple((each.name, each.hexdigest()) for each in hashes), b"".join(kept) if kept else None
