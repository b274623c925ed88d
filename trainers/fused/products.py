"""Matrix products of the fused layer, in the weights' own type or in FP8; weights' gradients add up in place.

In: rows [tokens, width], and weights that are neighbours in one flat buffer (layouts/zero1.py). Out: rows.
FP8 uses dynamic tensorwise scaling: E4M3 in forward, E5M2 for gradients, float32 scales (arXiv 2209.05433).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from fused import ops

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

# Adds the gradient of a weight, given x and, where it is known, its largest absolute value.
AddGradient: TypeAlias = "Callable[..., None]"

# Forward and gradients. MI300's FP8 has no negative zero and half of OCP's range in the first (`Peak.fnuz`).
OCP = (torch.float8_e4m3fn, torch.float8_e5m2)
FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


class Joined:
    """Neighbouring weights [out_i, in] of one flat buffer as one matrix, with its gradient."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.unit = layers[0].weight.unit
        self.key = id(self)
        self.value = _side_by_side([layer.weight.detach() for layer in layers])
        self.gradient = _side_by_side([layer.weight.main_grad for layer in layers])

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Gradient of the product x·valueᵀ: dyᵀ·x. The first of a step is written, later ones are added."""
        accumulate(self.gradient, dy.t(), x, fresh=self.unit.fresh)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    first, rows = parts[0], 0
    for part in parts:
        if part.data_ptr() != first.data_ptr() + rows * first.shape[1] * first.element_size():
            raise AssertionError("weights of one product must be neighbours in their flat buffer")
        rows += part.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())


def accumulate(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """Out = a·b or out += a·b, in the type of `out`."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if fresh else out.addmm_(a, b)
    elif not a.is_cuda:
        product = a.float() @ b.float()
        out.copy_(product) if fresh else out.add_(product)
    elif fresh:
        torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
    else:
        torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)


class Fp8Matrix(NamedTuple):
    """An FP8 matrix row-major, transposed, and its scale. A layout that is not needed is `None`."""

    row: Tensor | None
    col: Tensor | None
    scale: Tensor

    @classmethod
    def of(
        cls, x: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, top: Tensor | None = None
    ) -> Fp8Matrix:
        """Cast x [M, N]; `top` is its largest absolute value, where an earlier kernel already found it."""
        top = ops.pick("amax", x.device)(x) if top is None else top
        return cls(*ops.pick("cast", x.device)(x, top, dtype, row=row, col=col))


def _fp8_product(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, fast: bool, out: Tensor | None = None
) -> Tensor:
    """A [M, K] · b [N, K]ᵀ in bfloat16. `fast` sums with fewer bits in the tensor cores (forward only)."""
    if a.is_cuda:
        if out is None:
            return torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)  # noqa: SLF001
        scaled_mm = torch.ops.aten._scaled_mm.out  # noqa: SLF001 - torch's own function takes no `out`
        found: Tensor = scaled_mm(a, b.t(), *scales, None, None, out.dtype, fast, out=out)
        return found
    product = (a.float() @ b.float().t()) * scales[0] * scales[1]
    return product.bfloat16() if out is None else out.copy_(product)


class NativeProducts:
    """Products in the weights' own type."""

    def forward(self, x: Tensor, weight: Joined, _top: Tensor | None = None) -> Tensor:
        """x·weightᵀ."""
        return x @ weight.value.t()

    def backward(self, dy: Tensor, weight: Joined, _top: Tensor | None = None) -> tuple[Tensor, AddGradient]:
        """dy·weight, and a function that adds the weight's gradient, given x."""
        return dy @ weight.value, lambda x, _top=None: weight.add(dy, x)


class Fp8Products:
    """Products in FP8; a weight is cast once a step and serves every microbatch."""

    def __init__(self, *, fnuz: bool) -> None:
        self.values, self.gradients = FNUZ if fnuz else OCP

    def cast_weight(self, weight: Joined) -> Fp8Matrix:
        """Both layouts of the weight, cast at most once a step."""
        cache: dict[int, Fp8Matrix] = weight.unit.cache
        if weight.key not in cache:
            cache[weight.key] = Fp8Matrix.of(weight.value, self.values)
        return cache[weight.key]

    def forward(self, x: Tensor, weight: Joined, top: Tensor | None = None) -> Tensor:
        """x·weightᵀ."""
        w, a = self.cast_weight(weight), Fp8Matrix.of(x, self.values, col=False, top=top)
        return _fp8_product(a.row, w.row, (a.scale, w.scale), fast=True)

    def backward(self, dy: Tensor, weight: Joined, top: Tensor | None = None) -> tuple[Tensor, AddGradient]:
        """dy·weight, and a function that adds the weight's gradient, given x."""
        w, g = self.cast_weight(weight), Fp8Matrix.of(dy, self.gradients, top=top)
        dx = _fp8_product(g.row, w.col, (g.scale, w.scale), fast=False)

        def add(x: Tensor, top: Tensor | None = None) -> None:
            a = Fp8Matrix.of(x, self.values, row=False, top=top)
            scales, out = (g.scale, a.scale), weight.gradient
            if weight.unit.fresh and out.dtype == torch.bfloat16:
                _fp8_product(g.col, a.col, scales, fast=False, out=out)
            else:
                part = _fp8_product(g.col, a.col, scales, fast=False)
                out.copy_(part) if weight.unit.fresh else out.add_(part)

        return dx, add
