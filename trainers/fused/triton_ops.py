"""The Triton kernels of the fused layer: each reads memory once where autograd's formulas read it two or
three times.

In and out: as the functions of the same name in ops.py, which are also their reference in tests. On a GPU at
its power cap the energy of a step decides its speed, and moving a byte costs more than an operation.
"""

from fused.triton_flat import adamw_, amax, cast
from fused.triton_layer import cross_entropy_, rope_, rope_backward, swiglu, swiglu_backward_
from fused.triton_norms import add_norm, norm_apply, norm_backward

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
