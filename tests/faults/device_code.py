"""Files as compilers write them: ELF libraries with device code of chosen architectures. In: architectures.
Out: bytes.

The parsers under test read real libraries in the images. These files have faults that no real library has.
"""

import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"


def bundle(archs: Sequence[str]) -> bytes:
    """What `hipcc --genco` writes: an empty entry for the host, and a code object per architecture."""
    ids = [
        (b"host-x86_64-unknown-linux-gnu-", 0),
        *((f"hipv4-amdgcn-amd-amdhsa--{a}:xnack-".encode(), 8) for a in archs),
    ]
    entries = b"".join(struct.pack("<QQQ", 4096, size, len(name)) + name for name, size in ids)
    return BUNDLE + struct.pack("<Q", len(ids)) + entries


def compressed(archs: Sequence[str], *, version: int = 2) -> bytes:
    """The same with `--offload-compress`, by zlib."""
    plain = bundle(archs)
    packed = zlib.compress(plain)
    sizes = {
        1: struct.pack("<I", len(plain)),
        2: struct.pack("<II", len(packed) + 24, len(plain)),
        3: struct.pack("<QQ", len(packed) + 32, len(plain)),
    }
    return b"CCOB" + struct.pack("<HH", version, 0) + sizes[version] + bytes(8) + packed


def fatbin(archs: Sequence[str], *, ptx: Sequence[str] = ()) -> bytes:
    """What `nvcc -fatbin` writes: an entry of machine code per architecture, and entries of PTX."""
    kinds = [*((1, arch) for arch in ptx), *((2, arch) for arch in archs)]
    entries = b"".join(
        struct.pack("<HHIQIIHHI", kind, 0x101, 64, 8, 0, 0, 0, 1, int(arch[3:])) + bytes(64 - 32 + 8)
        for kind, arch in kinds
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def elf(sections: Mapping[str, bytes]) -> bytes:
    """The smallest shared object with these sections."""
    names = ["", *sections, ".shstrtab"]
    strings = b"".join(name.encode() + b"\0" for name in names)
    bodies = [b"", *sections.values(), strings]
    data, headers, offset = b"", b"", 64
    for number, body in enumerate(bodies):
        name = sum(len(earlier) + 1 for earlier in names[:number])
        headers += struct.pack("<IIQQQQIIQQ", name, number and 1, 0, 0, offset, len(body), 0, 0, 1, 0)
        data += body
        offset += len(body)
    table = 64 + len(data)
    head = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head += struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, table, 0, 64, 0, 0, 64, len(bodies), len(bodies) - 1
    )
    return head + data + headers


def amd_library(archs: Sequence[str]) -> bytes:
    """A library with HIP code, of two translation units."""
    half = len(archs) // 2
    return elf({".text": b"x", ".hip_fatbin": bundle(archs[:half]).ljust(4096, b"\0") + bundle(archs[half:])})


def message(value: Any) -> bytes:
    """MessagePack of texts, numbers, lists and maps, each with a length of 32 bits."""
    if isinstance(value, int):
        return b"\xd3" + struct.pack(">q", value)
    if isinstance(value, str):
        return b"\xdb" + struct.pack(">I", len(value.encode())) + value.encode()
    kind, parts = b"\xdd", value
    if isinstance(value, Mapping):
        kind, parts = b"\xdf", [part for pair in value.items() for part in pair]
    return kind + struct.pack(">I", len(value)) + b"".join(map(message, parts))


def kpack_reference(name: str, place: str = "../.kpack/blas_@GFXARCH@.kpack") -> bytes:
    """The section `.rocm_kpack_ref` of a library whose code is in archives."""
    return message({"kernel_name": name, "kpack_search_paths": [place]})


def split_library(name: str, place: str = "../.kpack/blas_@GFXARCH@.kpack") -> bytes:
    """A library as ROCm's wheels have it: its own code is zeroed, and a section names archives."""
    return elf({".hip_fatbin": bytes(4096), ".rocm_kpack_ref": kpack_reference(name, place)})


def kpack(arch: str, libraries: Sequence[str]) -> bytes:
    """An archive with the code of these libraries for one architecture, one code object each."""
    toc = {f"{name}#0": {arch: {"type": "hsaco", "ordinal": 0, "original_size": 8}} for name in libraries}
    table = {"format_version": 1, "group_name": "blas", "gfx_arches": [arch], "toc": toc}
    return b"KPAK" + struct.pack("<IQ", 1, 64) + bytes(64 - 16) + message(table)


def nvidia_library(archs: Sequence[str]) -> bytes:
    """A library with CUDA code."""
    return elf({".text": b"x", ".nv_fatbin": fatbin(archs, ptx=archs[-1:])})
