"""Float64 operands for references, and the precision switches of a kernel under test. In: tensors, a dtype.

Out: float64 tensors; a context with the dtype's precision.
"""

import contextlib
from collections.abc import Iterator

import torch

# Above this many operand elements the device computes the float64 reference: a CPU would take minutes, and
# the device's float64 routines are not the ones under test.
HOST_LIMIT = 1 << 16


def float64(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands in float64: small ones on the CPU, others on their device."""
    small = sum(tensor.numel() for tensor in tensors) <= HOST_LIMIT
    return tuple(tensor.detach().to("cpu" if small else tensor.device).double() for tensor in tensors)


SWITCHES = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 only for the dtype "tf32", and no reduced-precision reductions.
    The image's defaults do not count.
    """
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in SWITCHES]
    for name in SWITCHES:
        setattr(matmul, name, name == "allow_tf32" and dtype == "tf32")
    try:
        yield
    finally:
        for name, value in zip(SWITCHES, before, strict=True):
            setattr(matmul, name, value)
