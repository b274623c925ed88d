"""Device code that ROCm's wheels keep beside their libraries. In: a library. Out: its architectures.

From ROCm 7.13 on a library may hold no device code: its section `.rocm_kpack_ref` names archives, one an
architecture, which packages such as rocm-sdk-device-gfx942 bring (ROCm/TheRock docs/packaging/
python_packaging.md). Section and archives are MessagePack (ROCm/rocm-systems shared/kpack, docs/
multi_arch_packaging_with_kpack.md): the section names the library and where archives are, an archive begins
with KPAK, its version and the place of its table of contents.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vendors import elf

SECTION = ".rocm_kpack_ref"
PLACEHOLDER = "@GFXARCH@"
MAGIC = b"KPAK"
DEEPEST = 16  # levels of a table; it has three
# First byte -> how a number or a length is written after it (msgpack/msgpack spec.md).
NUMBERS = {
    0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q",
    0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q",
}  # fmt: skip
LENGTHS = {
    0xC4: ("bytes", ">B"), 0xC5: ("bytes", ">H"), 0xC6: ("bytes", ">I"),
    0xD9: ("text", ">B"), 0xDA: ("text", ">H"), 0xDB: ("text", ">I"),
    0xDC: ("list", ">H"), 0xDD: ("list", ">I"), 0xDE: ("map", ">H"), 0xDF: ("map", ">I"),
}  # fmt: skip
CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def architectures(library: Path, reference: bytes) -> Iterator[str]:
    """Architectures for which the archives that a library names hold its code, as the loader finds them.

    Args:
        library: The library; places of archives are relative to it.
        reference: Its section `.rocm_kpack_ref`.

    Raises:
        ValueError: The section or an archive is malformed.
    """
    told = unpack(reference)
    for place in told["kpack_search_paths"]:
        folder, _, name = place.rpartition("/")
        for archive in sorted((library.parent / folder).glob(name.replace(PLACEHOLDER, "*"))):
            yield from _held(archive, told["kernel_name"])


def _held(archive: Path, library: str) -> Iterator[str]:
    """Architectures of one library in an archive. Its entries are `lib/librccl.so#0`, one a code object."""
    with elf.mapped(archive) as data:
        if data[: len(MAGIC)] != MAGIC:
            raise ValueError(f"{archive}: no kpack archive")
        (table,) = struct.unpack_from("<Q", data, 8)
        contents = unpack(data, table)
    entries = (of for name, of in contents["toc"].items() if name.partition("#")[0] == library)
    found = {arch for of in entries for arch in of} & set(contents["gfx_arches"])
    yield from (match[0] for arch in found if (match := re.match(r"gfx[0-9a-f]+", arch)))


def unpack(data: bytes | mmap.mmap, start: int = 0) -> Any:
    """The first MessagePack value of `data` from `start` on. Raises `ValueError` if it is malformed."""
    try:
        return _Reader(data, start).value(0)
    except (IndexError, struct.error, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"malformed MessagePack: {error}") from error


class _Reader:
    """A position in MessagePack data."""

    def __init__(self, data: bytes | mmap.mmap, start: int) -> None:
        self.data, self.at = data, start

    def value(self, depth: int) -> Any:
        if depth > DEEPEST:
            raise ValueError(f"MessagePack is nested more than {DEEPEST} deep")
        (first,) = self._take(1)
        if first <= 0x7F or first >= 0xE0:
            return first if first <= 0x7F else first - 0x100
        if first in CONSTANTS:
            return CONSTANTS[first]
        if first in NUMBERS:
            return self._number(NUMBERS[first])
        return self._sized(first, depth)

    def _sized(self, first: int, depth: int) -> Any:
        if first < 0xC0:  # the length is in the first byte
            kind = "map" if first < 0x90 else "list" if first < 0xA0 else "text"
            length = first & (0x1F if kind == "text" else 0x0F)
        elif first in LENGTHS:
            kind, form = LENGTHS[first]
            length = int(self._number(form))
        else:
            raise ValueError(f"MessagePack of type {first:#x}")
        if kind == "map":
            return {self.value(depth + 1): self.value(depth + 1) for _ in range(length)}
        if kind == "list":
            return [self.value(depth + 1) for _ in range(length)]
        taken = self._take(length)
        return taken.decode() if kind == "text" else taken

    def _number(self, form: str) -> float:
        (found,) = struct.unpack(form, self._take(struct.calcsize(form)))
        return float(found) if form in {">f", ">d"} else int(found)

    def _take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) < count:
            raise ValueError("MessagePack ends early")
        self.at += count
        return taken
