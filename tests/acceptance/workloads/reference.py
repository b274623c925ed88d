"""Where the float64 references are computed, and the precision switches around the kernel under test."""

import contextlib
from collections.abc import Iterator

import torch

# Beyond this many operand elements the device computes its own float64 reference; the routines differ from
# those under test, and a CPU would take minutes.
HOST_LIMIT = 1 << 16


def float64(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands as float64, on the CPU while they are small, else where they are."""
    small = sum(tensor.numel() for tensor in tensors) <= HOST_LIMIT
    return tuple(tensor.detach().to("cpu" if small else tensor.device).double() for tensor in tensors)


SWITCHES = ("allow_tf32", "allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    """TF32 only where it is named, and no reduced-precision reductions, whatever the image's defaults are."""
    matmul = torch.backends.cuda.matmul
    before = [getattr(matmul, name) for name in SWITCHES]
    for name in SWITCHES:
        setattr(matmul, name, name == "allow_tf32" and dtype == "tf32")
    try:
        yield
    finally:
        for name, value in zip(SWITCHES, before, strict=True):
            setattr(matmul, name, value)
