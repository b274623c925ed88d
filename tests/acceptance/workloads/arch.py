"""What the device's architecture can do, from tables. In: the visible device.
Out: names of backends and formats.
"""

import torch

# Attention backends for which PyTorch has kernels, by the beginning of the architecture's name.
ATTENTION = {
    "cpu": ("math", "flash"),
    "gfx90a": ("math", "flash", "efficient"),
    "gfx94": ("math", "flash", "efficient"),
    "gfx95": ("math", "flash", "efficient"),
    "sm_8": ("math", "flash", "efficient", "cudnn"),
    "sm_9": ("math", "flash", "efficient", "cudnn"),
    "sm_1": ("math", "flash", "efficient", "cudnn"),
}
# AMD's first fp8 has another bias, no infinities and no negative zero; later devices use the OCP format.
FP8 = {
    "gfx94": "float8_e4m3fnuz", "gfx95": "float8_e4m3fn", "sm_89": "float8_e4m3fn", "sm_9": "float8_e4m3fn",
    "sm_1": "float8_e4m3fn",
}  # fmt: skip
# MI200's matrix instructions of 16 bits take subnormal operands for zero and give zero for subnormal results,
# so MIOpen's backward convolutions, and rocBLAS's products in backward, compute fp16 in bf16
# (https://rocm.docs.amd.com/projects/MIOpen/en/latest/MI200AlternateImplementation.html; PyTorch's
# docs/source/notes/numerical_accuracy.rst: with no variable set, forward is original and backward alternate;
# aten/src/ATen/cuda/CUDABlas.cpp gives rocblas_gemm_flags_fp16_alt_impl where
# ROCmBackwardPassGuard::is_backward_pass()). Both are the documented behaviour of gfx90a, and of no other.
MI200 = "gfx90a"
TF32 = ("sm_8", "sm_9", "sm_1")


def name() -> str:
    """`gfx942`, `sm_90`, `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    gfx = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    return gfx if gfx.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def attention_backends() -> tuple[str, ...]:
    """The attention backends that must work here. Raises `LookupError` for an architecture without a row."""
    for prefix, backends in ATTENTION.items():
        if name().startswith(prefix):
            return backends
    raise LookupError(f"workloads/arch.py ATTENTION has no row for {name()}: add its backends")


def fp8() -> torch.dtype | None:
    """The 8-bit float of this architecture's matrix units; None if they have none."""
    found = [dtype for prefix, dtype in FP8.items() if name().startswith(prefix)]
    return getattr(torch, found[0]) if found else None


def flushes_subnormals() -> bool:
    """Whether a product of 16-bit operands may take those below the smallest normal number for zero."""
    return name() == MI200


def backward_roundoff(dtype: torch.dtype) -> float:
    """The relative error that a product in backward may make of each operand, beside its own rounding."""
    return float(torch.finfo(torch.bfloat16).eps) / 2 if dtype == torch.float16 and name() == MI200 else 0.0


def has_tf32() -> bool:
    """Whether PyTorch's switch can make float32 products use TF32."""
    return name().startswith(TF32)


def has_tma() -> bool:
    """Whether hardware moves the blocks of a tensor's descriptor: it stores whole pieces of 16 bytes."""
    return name().startswith(("sm_9", "sm_1"))
