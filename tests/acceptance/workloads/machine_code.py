"""Compile Triton kernels for GPUs that this machine need not have. In: a kernel, an arch, a dtype.
Out: facts of the code.

The facts are matrix instructions, spills, shared memory and the width of loads. `triton.compile` with an
explicit target needs no driver. For an unsupported fp8 format it raises for NVIDIA, but silently computes in
fp16 for AMD; only the instruction shows that.
"""

import inspect
import re
import subprocess
import warnings
from typing import Any

import triton
import triton.language as tl
from triton.backends import backends
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BLOCK = 64
NAMES_CONSTANTS = "constexprs" in inspect.signature(ASTSource).parameters  # since Triton 3.3
WIDE_LOAD = re.compile(
    r"(?:global|buffer)_load_(?:lds_)?(?:dwordx4|b128)|ld\.global\.\S*v4\.b32|cp\.async\.cg\S* \[.*?\], 0x10"
)
MATRIX = re.compile(r"v_mfma_\w+|wgmma\.mma_async\.\S+|tcgen05\.mma\S*|(?<!w)mma\.sync\.\S+")
SPILL = re.compile(r"(?:[vs]gpr_spill_count|ScratchSize):?\s+(\d+)")


# Triton takes annotations of its kernels for types of its own, so the kernels carry none.
@triton.jit  # type: ignore[untyped-decorator]
def matmul(a, b, c, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One tile of c = a @ b with fp32 accumulation."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inner = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, width, BLOCK):
        x = tl.load(a + rows[:, None] * width + (start + inner)[None, :])
        y = tl.load(b + (start + inner)[:, None] + columns[None, :] * width)
        total = tl.dot(x, y, total)
    tl.store(c + rows[:, None] * width + columns[None, :], total)


@triton.jit  # type: ignore[untyped-decorator]
def softmax(a, b, c, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """A softmax of rows, which uses the device's math library."""
    columns = tl.arange(0, BLOCK * BLOCK)
    mask = columns < width
    row = tl.load(a + tl.program_id(0) * width + columns, mask=mask, other=-float("inf")).to(tl.float32)
    scaled = tl.exp(row - tl.max(row, 0))
    tl.store(c + tl.program_id(0) * width + columns, scaled / tl.sum(scaled, 0), mask=mask)
    tl.store(b + tl.program_id(0), tl.max(row, 0).to(b.dtype.element_ty))


def backend_names() -> list[str]:
    """The backends of this Triton: "amd", "nvidia"."""
    return sorted(backends)


def compiled(kernel: str, arch: str, dtype: str, block: int = BLOCK, warps: int = 4) -> dict[str, Any]:
    """The facts of a kernel that is compiled for one tile, or the compiler's `error`."""
    # Two stages: what more of them need of shared memory is a choice of the kernel's author.
    options = None if block == BLOCK else {"num_warps": warps, "num_stages": 2}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            source = _source({"matmul": matmul, "softmax": softmax}[kernel], dtype, block)
            result = triton.compile(source, target=_target(arch), options=options)
        # Over the releases the compiler's errors have no common type, and the caller needs their text.
        except Exception as error:  # noqa: BLE001
            return {"error": str(error)}
    text = result.asm.get("amdgcn") or result.asm["ptx"]
    return {
        "error": None,
        "matrix": sorted(set(MATRIX.findall(text))),
        "spills": _spills(result.asm),
        "shared_bytes": result.metadata.shared,
        "wide_loads": len(WIDE_LOAD.findall(text)),
        "warnings": [str(warning.message) for warning in caught],
    }


def _target(arch: str) -> GPUTarget:
    return GPUTarget("hip", arch, 64) if arch.startswith("gfx") else GPUTarget("cuda", int(arch[3:]), 32)


def _source(kernel: Any, dtype: str, block: int) -> ASTSource:
    types = {"a": f"*{dtype}", "b": f"*{dtype}", "c": "*fp32", "width": "i32"}
    constants, aligned = {"BLOCK": block}, range(4)  # as the launcher tells of pointers and of a width by 16
    if NAMES_CONSTANTS:
        attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
        return ASTSource(kernel, signature(types, constants), constants, attributes)
    descriptor = triton.backends.compiler.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
    return ASTSource(kernel, signature(types, constants), constants, descriptor)


def signature(types: dict[str, str], constants: dict[str, Any]) -> dict[str, str]:
    """The types of a kernel's arguments as this release wants them: since 3.3 constants are among them."""
    if NAMES_CONSTANTS:
        return {**types, **dict.fromkeys(constants, "constexpr")}
    return types


def _spills(asm: Any) -> int | None:
    """Spilled registers or scratch bytes; None if the code object has no such figure."""
    if "amdgcn" in asm:
        return sum(int(count) for count in SPILL.findall(asm["amdgcn"]))
    try:
        sass = asm["sass"]  # disassembled on demand by the tool of the wheel
    except (KeyError, OSError, subprocess.CalledProcessError):
        return None
    return len(re.findall(r"\b(?:STL|LDL)\b", sass))
