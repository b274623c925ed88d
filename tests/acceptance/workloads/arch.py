"""What the device's architecture can do, from a table. In: the visible device.
Out: names of backends and formats.
"""

from dataclasses import dataclass

import torch

_TORCHS = ("math", "flash", "efficient")


@dataclass(frozen=True)
class Architecture:
    """What kernels can use.

    Attributes:
        attention: Backends of attention for which PyTorch has kernels.
        fp8: The 8-bit float of its matrix units, a name in torch; None if they have none. AMD's first one has
            another bias, no infinities and no negative zero; later devices use the OCP format.
        tf32: Whether PyTorch's switch can make float32 products use TF32.
        tma: Whether hardware moves the blocks of a tensor's descriptor: it stores whole pieces of 16 bytes.
    """

    attention: tuple[str, ...]
    fp8: str | None = None
    tf32: bool = False
    tma: bool = False


# By the beginning of the architecture's name; the first that fits decides. Without a row nothing is known.
ROWS = {
    "cpu": Architecture(("math", "flash")),
    "gfx90a": Architecture(_TORCHS),
    "gfx94": Architecture(_TORCHS, fp8="float8_e4m3fnuz"),
    "gfx95": Architecture(_TORCHS, fp8="float8_e4m3fn"),
    "sm_89": Architecture((*_TORCHS, "cudnn"), fp8="float8_e4m3fn", tf32=True),
    "sm_8": Architecture((*_TORCHS, "cudnn"), tf32=True),
    "sm_9": Architecture((*_TORCHS, "cudnn"), fp8="float8_e4m3fn", tf32=True, tma=True),
    "sm_10": Architecture((*_TORCHS, "cudnn"), fp8="float8_e4m3fn", tf32=True, tma=True),
    "sm_12": Architecture((*_TORCHS, "cudnn"), fp8="float8_e4m3fn", tf32=True, tma=True),
}
# MI200's matrix instructions of 16 bits take subnormal operands for zero and give zero for subnormal results,
# so MIOpen's backward convolutions, and rocBLAS's products in backward, compute fp16 in bf16
# (https://rocm.docs.amd.com/projects/MIOpen/en/latest/MI200AlternateImplementation.html; PyTorch's
# docs/source/notes/numerical_accuracy.rst: with no variable set, forward is original and backward alternate;
# aten/src/ATen/cuda/CUDABlas.cpp gives rocblas_gemm_flags_fp16_alt_impl where
# ROCmBackwardPassGuard::is_backward_pass()). Both are the documented behaviour of gfx90a, and of no other.
MI200 = "gfx90a"


def name() -> str:
    """`gfx942`, `sm_90`, `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    gfx = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    return gfx if gfx.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def known() -> Architecture:
    """The row of this device. Raises `LookupError` for an architecture without one."""
    found = next((row for prefix, row in ROWS.items() if name().startswith(prefix)), None)
    if found is None:
        raise LookupError(f"workloads/arch.py ROWS has no row for {name()}: add what its kernels can use")
    return found


def attention_backends() -> tuple[str, ...]:
    """The attention backends that must work here. Raises `LookupError`."""
    return known().attention


def fp8() -> torch.dtype | None:
    """The 8-bit float of this architecture's matrix units; None if they have none. Raises `LookupError`."""
    named = known().fp8
    return getattr(torch, named) if named else None


def flushes_subnormals() -> bool:
    """Whether a product of 16-bit operands may take those below the smallest normal number for zero."""
    return name() == MI200


def backward_roundoff(dtype: torch.dtype) -> float:
    """The relative error that a product in backward may make of each operand, beside its own rounding."""
    return float(torch.finfo(torch.bfloat16).eps) / 2 if dtype == torch.float16 and name() == MI200 else 0.0


def has_tf32() -> bool:
    """Whether PyTorch's switch can make float32 products use TF32. Raises `LookupError`."""
    return known().tf32


def has_tma() -> bool:
    """Whether hardware moves the blocks of a tensor's descriptor. Raises `LookupError`."""
    return known().tma
