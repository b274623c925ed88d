"""Sections of an ELF file. In: a mapped file. Out: the position of each section."""

import contextlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DT_NEEDED = 1
MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian, as every host of these GPUs


@dataclass(frozen=True)
class Section:
    """A section: its name, its place in the file and its size in bytes."""

    name: str
    offset: int
    size: int


@contextlib.contextmanager
def mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file, because only a few places of a library of half a gigabyte are read."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def sections(data: mmap.mmap) -> tuple[Section, ...]:
    """The sections of a file; none if it is not a 64-bit ELF file. Layout: System V ABI, chapter 4."""
    if data[: len(MAGIC)] != MAGIC:
        return ()
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + number * entry_bytes) for number in range(count)]
    strings = headers[names][4] if count else 0
    return tuple(
        Section(name=_string(data, strings + name), offset=offset, size=size)
        for name, _kind, _flags, _address, offset, size in headers
    )


def needed(data: mmap.mmap) -> tuple[str, ...]:
    """The libraries that a file names as needed (DT_NEEDED); none if it is not a 64-bit ELF file."""
    by_name = {section.name: section for section in sections(data)}
    dynamic, strings = by_name.get(".dynamic"), by_name.get(".dynstr")
    if dynamic is None or strings is None:
        return ()
    entries = (struct.unpack_from("<qQ", data, dynamic.offset + at) for at in range(0, dynamic.size - 15, 16))
    return tuple(_string(data, strings.offset + value) for tag, value in entries if tag == DT_NEEDED)


def _string(data: mmap.mmap, start: int) -> str:
    return data[start : data.find(b"\0", start)].decode()
