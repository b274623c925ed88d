"""NVIDIA's libraries, how they report their versions, and the device code in a file.

In: a loaded library, or a file. Out: its version; the architectures for which it holds machine code.
"""

# ruff: noqa: E501 - a table of libraries reads in rows

import ctypes
import functools
import mmap
import re
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

from vendors import elf
from vendors.software import Compiler, Library, Version, nccl, number

# Fat binaries: one header (magic, version, header bytes, payload bytes) and entries (kind, flags, header
# bytes, payload bytes, …, architecture at byte 28). Held to the real libraries of CUDA 13 by a test.
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
FATBIN_MAGIC = struct.pack("<I", 0xBA55ED50)
MACHINE_CODE = 2  # the kind of an entry; 1 is PTX, which the driver must still compile
MAJOR, MINOR, PATCH = range(3)  # libraryPropertyType of library_types.h


def _cuda(library: ctypes.CDLL) -> Version:
    code = number(library, "cudaRuntimeGetVersion")
    return (code // 1000, code % 1000 // 10)


def _nvrtc(library: ctypes.CDLL) -> Version:
    major, minor = ctypes.c_int(), ctypes.c_int()
    if code := library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)):
        raise OSError(f"nvrtcVersion answered {code}")
    return (major.value, minor.value)


def _property(function: str, library: ctypes.CDLL) -> Version:
    values = [ctypes.c_int() for _ in (MAJOR, MINOR, PATCH)]
    for which, value in enumerate(values):
        if code := library[function](which, ctypes.byref(value)):
            raise OSError(f"{function} answered {code}")
    return tuple(value.value for value in values)


def _toolkit(name: str, stem: str, *, needed: bool = False, device_code: bool = False) -> Library:
    """A library of the CUDA toolkit, whose wheel and `…GetProperty` function are named after it."""
    own = stem.removeprefix("lib")
    wheel = "nvidia-" + own.removesuffix("Lt")
    return Library(
        name=name,
        stem=stem,
        version=functools.partial(_property, own + "GetProperty"),
        wheels=(wheel, wheel + "-cu*"),
        needed=needed,
        device_code=device_code,
    )


LIBRARIES: tuple[Library, ...] = (
    Library(name="the CUDA runtime", stem="libcudart", version=_cuda, wheels=("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu*"), declared="runtime", needed=True),
    Library(name="NVRTC", stem="libnvrtc", version=_nvrtc, wheels=("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu*"), needed=True),
    Library(name="NCCL", stem="libnccl", version=nccl, wheels=("nvidia-nccl-*",), declared="collective", needed=True, device_code=True),
    _toolkit("cuBLAS", "libcublas", needed=True, device_code=True),
    _toolkit("cuBLASLt", "libcublasLt", needed=True, device_code=True),
    Library(
        name="cuDNN",
        stem="libcudnn",
        version=functools.partial(_property, "cudnnGetProperty"),
        wheels=("nvidia-cudnn-*",),
        needed=True,
        device_code=True,
        parts=(
            "libcudnn_adv",
            "libcudnn_cnn",
            "libcudnn_engines_precompiled",
            "libcudnn_engines_runtime_compiled",
            "libcudnn_graph",
            "libcudnn_heuristic",
            "libcudnn_ops",
        ),
    ),
    _toolkit("cuFFT", "libcufft"),
    _toolkit("cuRAND", "libcurand", device_code=True),
    _toolkit("cuSPARSE", "libcusparse", device_code=True),
    _toolkit("cuSOLVER", "libcusolver", device_code=True),
    Library(name="cuSPARSELt", stem="libcusparseLt", version=functools.partial(_property, "cusparseLtGetProperty"), wheels=("nvidia-cusparselt-*",), device_code=True),
    Library(name="nvJitLink", stem="libnvJitLink"),
    Library(name="torch's CUDA kernels", stem="libtorch_cuda", needed=True, device_code=True),
)  # fmt: skip
FOLDERS: tuple[str, ...] = (
    "/usr/local/cuda/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
)
VARIABLES: tuple[str, ...] = ("CUDA_", "NCCL_", "TORCH_NCCL_", "PYTORCH_", "CUBLAS_", "NVTE_", "TORCH_BLAS_")
SMI: str | None = "pynvml"
CODE_SECTIONS: tuple[str, ...] = FATBIN_SECTIONS
FOREIGN: dict[str, str] = {
    "triton-rocm": "Triton as PyTorch builds it for ROCm",
    "pytorch-triton-rocm": "Triton as PyTorch builds it for ROCm",
    "rocm": "ROCm as Python packages: something in this image was installed for AMD",
    "rocm-sdk-*": "ROCm as Python packages: something in this image was installed for AMD",
    "amd-aiter": "AITER has kernels for AMD alone",
}
TOLERATED: dict[str, str] = {}
COMPILER: Compiler | None = Compiler(
    program="nvcc",
    folders=("/usr/local/cuda/bin",),
    source='extern "C" __global__ void twice(float *x) { x[threadIdx.x] *= 2; }\n',
    suffix=".cu",
    options=("-fatbin", "-arch={arch}", "{source}", "-o", "{output}"),
    archs=("sm_80", "sm_90", "sm_100"),
)


def architectures(path: Path) -> frozenset[str]:
    """`sm_90` … of the machine code in a library, an extension, or a fat binary as nvcc writes it."""
    with elf.mapped(path) as data:
        if data[:4] == FATBIN_MAGIC:
            return frozenset(_entries(data, 0, len(data)))
        found = [section for section in elf.sections(data) if section.name in FATBIN_SECTIONS]
        return frozenset(
            arch
            for section in found
            for arch in _entries(data, section.offset, section.offset + section.size)
        )


def covers(arch: str, compiled: Iterable[str]) -> bool:
    """Machine code for sm_XY runs on a later minor of the same major (CUDA's binary compatibility)."""
    major, minor = divmod(int(arch[3:]), 10)
    numbers = [int(name[3:]) for name in compiled if re.fullmatch(r"sm_\d+", name)]
    return any(number // 10 == major and number % 10 <= minor for number in numbers)


def _entries(data: mmap.mmap, start: int, end: int) -> Iterator[str]:
    position = data.find(FATBIN_MAGIC, start, end)
    while position >= 0:
        _magic, _version, header, payload = struct.unpack_from("<IHHQ", data, position)
        after = position + header + payload
        yield from _machine_code(data, position + header, min(after, end))
        position = data.find(FATBIN_MAGIC, after, end)


def _machine_code(data: mmap.mmap, position: int, end: int) -> Iterator[str]:
    while position + 32 <= end:
        kind, _flags, header, payload = struct.unpack_from("<HHIQ", data, position)
        (arch,) = struct.unpack_from("<I", data, position + 28)
        if header == 0:
            return  # padding
        if kind == MACHINE_CODE:
            yield f"sm_{arch}"
        position += header + payload
