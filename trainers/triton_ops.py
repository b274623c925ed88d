"""Triton kernels of the fused layer: each passes over memory once where autograd's formulas pass two or
three times.

In and out: as the functions of the same name in ops.py, which are also what these are tested against. On a
GPU at its power cap the joules of a step are what counts, and a byte moved costs more than an operation.
"""

from triton_flat import adamw_, amax, cast
from triton_layer import cross_entropy_, rope_, rope_backward, swiglu, swiglu_backward_
from triton_norms import add_norm, norm_apply, norm_backward

__all__ = [
    "adamw_",
    "add_norm",
    "amax",
    "cast",
    "cross_entropy_",
    "norm_apply",
    "norm_backward",
    "rope_",
    "rope_backward",
    "swiglu",
    "swiglu_backward_",
]
