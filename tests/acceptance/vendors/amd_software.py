"""AMD's libraries, how they report their versions, and the device code in a file.

In: a loaded library, or a file. Out: its version; the architectures for which it holds machine code.
"""

# ruff: noqa: E501 - a table of libraries reads in rows

import ctypes
import mmap
import re
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from vendors import elf, kpack
from vendors.software import Compiler, Library, Version, nccl, number

# clang/docs/ClangOffloadBundler.rst: a bundle is the magic, a count and entries (offset, size, length of the
# id, id); a compressed one is CCOB, version, method, sizes that grew with the version, hash, and a bundle.
FATBIN_SECTION = ".hip_fatbin"
# HIP's number -> the ROCm releases with it: versions of hip-runtime-amd in repo.radeon.com/rocm/apt/RELEASE.
HIP_OF_RELEASES: Mapping[str, tuple[str, ...]] = {
    "6.2.41134": ("6.2.1", "6.2.2", "6.2.4"),
    "6.4.43482": ("6.4.0",),
    "6.4.43483": ("6.4.1",),
    "6.4.43484": ("6.4.2", "6.4.3", "6.4.4"),
    "7.1.25424": ("7.1.0",),
    "7.1.52802": ("7.1.1",),
    "7.2.26015": ("7.2.0",),
    "7.2.53211": ("7.2.1", "7.2.2", "7.2.3", "7.2.4"),
    "7.14.60850": ("7.14.0", "7.14.1"),
}
BUNDLE = b"__CLANG_OFFLOAD_BUNDLE__"
# Version -> bytes before the data, and how the whole size is written.
COMPRESSED = {1: (20, ""), 2: (24, "<I"), 3: (32, "<Q")}
START = re.compile(BUNDLE + rb"|CCOB[\1-\3]\0[\0\1]\0")
ZLIB, ZSTD = 0, 1
HEAD_BYTES = 1 << 16  # of a bundle: its ids come first, its code objects after them


def _hip(library: ctypes.CDLL) -> Version:
    code = number(library, "hipRuntimeGetVersion")
    return (code // 10_000_000, code // 100_000 % 100)


def _rocblas(library: ctypes.CDLL) -> Version:
    text = ctypes.create_string_buffer(64)
    if code := library.rocblas_get_version_string(text, ctypes.c_size_t(len(text))):
        raise OSError(f"rocblas_get_version_string answered {code}")
    return tuple(int(part) for part in re.findall(r"\d+", text.value.decode())[:3])


def _hipblaslt(library: ctypes.CDLL) -> Version:
    """The call takes a handle, which needs a device, but only checks that it is not null (hipblaslt.cpp)."""
    version, handle = ctypes.c_int(), ctypes.create_string_buffer(1 << 12)
    if code := library.hipblasLtGetVersion(handle, ctypes.byref(version)):
        raise OSError(f"hipblasLtGetVersion answered {code}")
    return (version.value // 100_000, version.value // 100 % 1000, version.value % 100)


def _miopen(library: ctypes.CDLL) -> Version:
    parts = [ctypes.c_size_t() for _ in range(3)]
    if code := library.miopenGetVersion(*map(ctypes.byref, parts)):
        raise OSError(f"miopenGetVersion answered {code}")
    return tuple(part.value for part in parts)


LIBRARIES: tuple[Library, ...] = (
    Library(name="the HIP runtime", stem="libamdhip64", version=_hip, declared="runtime", needed=True),
    Library(name="the HSA runtime", stem="libhsa-runtime64", needed=True),
    Library(name="the code object manager", stem="libamd_comgr"),
    Library(name="RCCL", stem="librccl", version=nccl, declared="collective", needed=True, device_code=True),
    Library(name="rocBLAS", stem="librocblas", version=_rocblas, needed=True, device_code=True, kernels=("rocblas/library/*{arch}*", "rocblas/*/library/*{arch}*")),
    Library(name="hipBLASLt", stem="libhipblaslt", version=_hipblaslt, needed=True, kernels=("hipblaslt/library/*{arch}*", "hipblaslt/*/library/*{arch}*")),
    Library(name="MIOpen", stem="libMIOpen", version=_miopen, needed=True, kernels=("../share/miopen/db/{arch}*", "miopen/db/{arch}*")),
    Library(name="AOTriton", stem="libaotriton_v2", kernels=("aotriton.images/*{arch}*",)),
    Library(name="torch's HIP kernels", stem="libtorch_hip", needed=True, device_code=True),
)  # fmt: skip
FOLDERS: tuple[str, ...] = ("/opt/rocm/lib", "/usr/lib/x86_64-linux-gnu")
VARIABLES: tuple[str, ...] = (
    *("HIP_", "HSA_", "GPU_", "ROCBLAS_", "HIPBLASLT_", "MIOPEN_", "AMD_", "NCCL_", "RCCL_", "TORCH_NCCL_"),
    *("PYTORCH_", "ROCM_KPACK_", "DISABLE_ADDMM_", "TORCH_BLAS_", "FLASH_ATTENTION_"),
)
SMI: str | None = "amdsmi"
CODE_SECTIONS: tuple[str, ...] = (FATBIN_SECTION, kpack.SECTION)
# Made for NVIDIA alone, whatever their wheels hold. Dao-AILab/flash-attention README.md: FlashAttention 3
# asks for Hopper and CUDA 12.3, 4 for CuTe DSL on Hopper or Blackwell; ROCm has FlashAttention 2.
FOREIGN: dict[str, str] = {
    "flash-attn-3": "FlashAttention 3 is written for NVIDIA's Hopper; ROCm has FlashAttention 2 (flash-attn)",
    "flash-attn-4": "FlashAttention 4 needs NVIDIA's CuTe DSL; ROCm has FlashAttention 2 (flash-attn)",
    "nvidia-cutlass-dsl*": "CuTe DSL compiles for NVIDIA alone",
    "nvidia-cu*": "a library of CUDA: something in this image was installed for NVIDIA",
    "nvidia-nccl-*": "NCCL: ROCm has RCCL, in torch's wheel",
    "cupy-cuda*": "CuPy for CUDA; for ROCm it is compiled with CUPY_INSTALL_USE_HIP=1",
    "transformer-engine-cu*": "Transformer Engine for CUDA; AMD has a fork of it (ROCm/TransformerEngine)",
    "tensorrt*": "TensorRT runs on NVIDIA alone",
}
TOLERATED: dict[str, str] = {
    # torchao/__init__.py loads its extensions only where torch has CUDA; its layers are Python and Triton.
    "torchao": "its Python and Triton parts run on both; the compiled ones are asked for on CUDA alone"
}
COMPILER: Compiler | None = Compiler(
    program="hipcc",
    folders=("/opt/rocm/bin",),
    source="#include <hip/hip_runtime.h>\n"
    'extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n',
    suffix=".hip",
    options=("--genco", "--offload-arch={arch}", "{source}", "-o", "{output}"),
    archs=("gfx90a", "gfx942", "gfx950"),
)


def architectures(path: Path) -> frozenset[str]:
    """`gfx942` … of the code objects in a library, an extension, or a bundle as hipcc writes it.

    Of a library that names archives only these count: what is left of its own section is never loaded.
    """
    with elf.mapped(path) as data:
        if START.match(data):
            return frozenset(_bundled(data, 0, len(data)))
        sections = elf.sections(data)
        for section in sections:
            if section.name == kpack.SECTION:
                reference = data[section.offset : section.offset + section.size]
                return frozenset(kpack.architectures(path, reference))
        found = [section for section in sections if section.name == FATBIN_SECTION]
        return frozenset(
            arch
            for section in found
            for arch in _bundled(data, section.offset, section.offset + section.size)
        )


def covers(arch: str, compiled: Iterable[str]) -> bool:
    """A code object runs on its own architecture only."""
    return arch in compiled


def _bundled(data: mmap.mmap, position: int, end: int) -> Iterator[str]:
    """Architectures of all bundles between two places:
    there is one per translation unit, one after the other.
    """
    while match := START.search(data, position, end):
        position, size = match.end(), 0
        if match[0] == BUNDLE:
            head = data[match.start() : match.start() + HEAD_BYTES]
        else:
            head, size = _unpacked_head(data, match.start(), end)
        yield from _ids(head)
        # Skip the data: compressed bytes may look like a bundle.
        position = max(position, match.start() + size)


def _ids(head: bytes) -> Iterator[str]:
    """Architectures in ids such as `hipv4-amdgcn-amd-amdhsa--gfx90a:xnack-`; the host's entry has none."""
    if not head.startswith(BUNDLE):
        return
    (count,) = struct.unpack_from("<Q", head, len(BUNDLE))
    position = len(BUNDLE) + 8
    for _ in range(count):
        if position + 24 > len(head):
            return
        _offset, size, length = struct.unpack_from("<QQQ", head, position)
        name = head[position + 24 : position + 24 + length].decode("ascii", "replace")
        if size and (arch := re.search(r"gfx[0-9a-f]+", name)):
            yield arch[0]
        position += 24 + length


def _unpacked_head(data: mmap.mmap, position: int, end: int) -> tuple[bytes, int]:
    """The beginning of a compressed bundle, unpacked, and the whole size; version 1 has no size, so 0."""
    version, method = struct.unpack_from("<HH", data, position + 4)
    header, size = COMPRESSED[version]
    (whole,) = struct.unpack_from(size, data, position + 8) if size else (0,)
    packed = data[position + header : min(end, position + (4 << 20))]
    head = zlib.decompressobj().decompress(packed, HEAD_BYTES) if method == ZLIB else _zstd_head(packed)
    return head, whole


class _Buffer(ctypes.Structure):
    """ZSTD_inBuffer and ZSTD_outBuffer of zstd.h."""

    _fields_ = (("memory", ctypes.c_void_p), ("size", ctypes.c_size_t), ("position", ctypes.c_size_t))


def _zstd_head(packed: bytes) -> bytes:
    """Unpack with the system's libzstd, which dpkg and rpm need too: Python reads zstd only from 3.14 on."""
    zstd = ctypes.CDLL("libzstd.so.1")
    zstd.ZSTD_createDStream.restype = ctypes.c_void_p
    zstd.ZSTD_decompressStream.restype = ctypes.c_size_t
    stream = ctypes.c_void_p(zstd.ZSTD_createDStream())
    unpacked = ctypes.create_string_buffer(HEAD_BYTES)
    source = _Buffer(ctypes.cast(ctypes.c_char_p(packed), ctypes.c_void_p), len(packed), 0)
    target = _Buffer(ctypes.cast(unpacked, ctypes.c_void_p), len(unpacked), 0)
    try:
        left = zstd.ZSTD_decompressStream(stream, ctypes.byref(target), ctypes.byref(source))
        if zstd.ZSTD_isError(ctypes.c_size_t(left)):
            raise OSError("libzstd cannot read a compressed bundle")
    finally:
        zstd.ZSTD_freeDStream(stream)
    return unpacked.raw[: target.position]
