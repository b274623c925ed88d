"""The Llama layer with its backward written out: no compiler, no concatenation, weights' gradients added in
place.

In: a model of models/llama.py whose weights zero1 laid side by side. Out: the same function, faster. Query,
key and value
are one product, gate and up another; the residual sum is fused with the next norm, so a layer passes on (sum,
update) and
the next adds them; norms and SwiGLU are made again in backward from what must be kept anyway; the loss's
gradient is
made while a chunk of logits exists. FP8 is dynamic tensorwise scaling: E4M3 forward, E5M2 gradients, float32
scales.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import ops
from models.layers import Rotary

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CHUNK = 4096  # rows of logits at a time: 1 GB of bfloat16 at Llama 3's vocabulary


class Joined:
    """Neighbouring weights [out_i, in] of one flat buffer as one matrix, with its gradient."""

    def __init__(self, *layers: nn.Linear) -> None:
        self.unit = layers[0].weight.unit
        self.key = id(self)
        self.value = _side_by_side([layer.weight.detach() for layer in layers])
        self.gradient = _side_by_side([layer.weight.main_grad for layer in layers])

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Gradient of the product x·valueᵀ: dyᵀ·x, written first, then added to."""
        _accumulate(self.gradient, dy.t(), x, fresh=self.unit.fresh)


def _side_by_side(parts: list[Tensor]) -> Tensor:
    first, rows = parts[0], 0
    for part in parts:
        assert part.data_ptr() == first.data_ptr() + rows * first.shape[1] * first.element_size(), (
            "not neighbours"
        )
        rows += part.shape[0]
    return first.as_strided((rows, first.shape[1]), first.stride())


def _accumulate(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
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


class Eight(NamedTuple):
    """An FP8 matrix as it lies, transposed, and its scale; what is not needed is None."""

    row: Tensor | None
    col: Tensor | None
    scale: Tensor

    @classmethod
    def of(
        cls, x: Tensor, dtype: torch.dtype, *, row: bool = True, col: bool = True, top: Tensor | None = None
    ) -> Eight:
        """Cast x [M, N]; `top` is its largest absolute value, where something already found it."""
        top = ops.pick("amax", x.device)(x) if top is None else top
        return cls(*ops.pick("cast", x.device)(x, top, dtype, row=row, col=col))


def _eight_mm(
    a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor], *, fast: bool, out: Tensor | None = None
) -> Tensor:
    """A [M, K] · b [N, K]ᵀ in bfloat16. `fast` keeps sums in the tensor cores' fewer bits (forward only)."""
    if a.is_cuda:
        kind = torch.bfloat16 if out is None else out.dtype
        return (
            torch.ops.aten._scaled_mm.out(  # noqa: SLF001
                a, b.t(), *scales, None, None, kind, fast, out=out
            )
            if out is not None
            else torch._scaled_mm(  # noqa: SLF001
                a, b.t(), *scales, out_dtype=kind, use_fast_accum=fast
            )
        )
    product = (a.float() @ b.float().t()) * scales[0] * scales[1]
    return product.bfloat16() if out is None else out.copy_(product)


class Half:
    """Products in the weights' own type."""

    def forward(self, x: Tensor, weight: Joined, _top: Tensor | None = None) -> Tensor:
        """x·weightᵀ."""
        return x @ weight.value.t()

    def backward(self, dy: Tensor, weight: Joined, _top: Tensor | None = None) -> tuple[Tensor, Callable]:
        """dy·weight, and a call that adds the weight's gradient given x."""
        return dy @ weight.value, lambda x, _top=None: weight.add(dy, x)


class Quarter:
    """Products in FP8; a weight is cast once a step and serves every microbatch."""

    def cast_weight(self, weight: Joined) -> Eight:
        """Both layouts of the weight."""
        cache = weight.unit.cache
        if weight.key not in cache:
            cache[weight.key] = Eight.of(weight.value, E4M3)
        return cache[weight.key]

    def forward(self, x: Tensor, weight: Joined, top: Tensor | None = None) -> Tensor:
        """x·weightᵀ."""
        w, a = self.cast_weight(weight), Eight.of(x, E4M3, col=False, top=top)
        return _eight_mm(a.row, w.row, (a.scale, w.scale), fast=True)

    def backward(self, dy: Tensor, weight: Joined, top: Tensor | None = None) -> tuple[Tensor, Callable]:
        """dy·weight, and a call that adds the weight's gradient given x."""
        w, g = self.cast_weight(weight), Eight.of(dy, E5M2, top=top)
        dx = _eight_mm(g.row, w.col, (g.scale, w.scale), fast=False)

        def add(x: Tensor, top: Tensor | None = None) -> None:
            a = Eight.of(x, E4M3, row=False, top=top)
            scales, out = (g.scale, a.scale), weight.gradient
            if weight.unit.fresh and out.dtype == torch.bfloat16:
                _eight_mm(g.col, a.col, scales, fast=False, out=out)
            else:
                part = _eight_mm(g.col, a.col, scales, fast=False)
                out.copy_(part) if weight.unit.fresh else out.add_(part)

        return dx, add


class Layer:
    """The weights of one block, and its forward and backward over rows [tokens, width]."""

    def __init__(self, block: nn.Module, matmul: Half | Quarter, *, fp8: bool) -> None:
        attention, mlp = block.attention, block.mlp
        self.unit = attention.q.weight.unit
        self.norm1, self.norm2 = block.attention_norm, block.mlp_norm
        self.qkv, self.out = Joined(attention.q, attention.k, attention.v), Joined(attention.o)
        self.gate_up, self.down = Joined(mlp.gate, mlp.up), Joined(mlp.down)
        self.dim = attention.head_dim
        self.heads, self.kv = (layer.weight.shape[0] // self.dim for layer in (attention.q, attention.k))
        self.matmul, self.fp8 = matmul, fp8

    def top(self, x: Tensor) -> Tensor | None:
        """A place for a largest value, where FP8 needs one."""
        return torch.zeros((), device=x.device, dtype=torch.float32) if self.fp8 else None

    def forward(self, x: Tensor, delta: Tensor | None, rotary: Rotary, batch: int) -> tuple[Any, ...]:
        """The residual sum before the MLP, the MLP's update, and what backward needs."""
        run, mm = (lambda name: ops.pick(name, x.device)), self.matmul.forward
        tops = [self.top(x) for _ in range(3)]
        s1, h, r1 = run("add_norm")(x, delta, self.norm1.weight, self.norm1.eps, tops[0])
        qkv = mm(h, self.qkv, tops[0])
        run("rope_")(qkv, *rotary, self.heads + self.kv)
        parts, o = self.attend(qkv, batch)
        rows = o.detach().transpose(1, 2).reshape(x.shape[0], -1)
        s2, h, r2 = run("add_norm")(s1, mm(rows, self.out), self.norm2.weight, self.norm2.eps, tops[1])
        gu = mm(h, self.gate_up, tops[1])
        update = mm(run("swiglu")(gu, tops[2]), self.down, tops[2])
        return s2, update, (s1, r1, parts, o, s2, r2, gu, tops)

    def attend(self, qkv: Tensor, batch: int) -> tuple[list[Tensor], Tensor]:
        """Leaves q, k, v [batch, heads, sequence, head_dim] and the output with its graph: torch owns
        attention.
        """
        grid = qkv.view(batch, -1, self.heads + 2 * self.kv, self.dim).transpose(1, 2)
        parts = [part.detach().requires_grad_() for part in grid.split((self.heads, self.kv, self.kv), 1)]
        with torch.enable_grad():
            o = F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=self.heads != self.kv)
        return parts, o

    def backward(self, saved: tuple[Any, ...], gs: Tensor, gu_out: Tensor, rotary: Rotary) -> Tensor:
        """Gradient of the block's input sum; weights' gradients go to their buffers."""
        s1, r1, parts, o, s2, r2, gu, tops = saved
        run, mm = (lambda name: ops.pick(name, gs.device)), self.matmul.backward
        da, add = mm(gu_out, self.down)
        top = self.top(gs)
        dgu, a = run("swiglu_backward_")(da, gu, top)
        add(a, tops[2])
        del a, da
        dh, add = mm(dgu, self.gate_up, top)
        add(run("norm_apply")(s2, r2, self.norm2.weight), tops[1])
        ds, dw = run("norm_backward")(dh, s2, r2, self.norm2.weight, gs)
        self.add_norm_gradient(self.norm2, dw)
        rows = ds.shape[0]
        do, add = mm(ds, self.out)
        add(o.detach().transpose(1, 2).reshape(rows, -1))
        batch = parts[0].shape[0]
        grads = torch.autograd.grad(o, parts, do.view(batch, -1, self.heads, self.dim).transpose(1, 2))
        dq, dk, dv = (g.transpose(1, 2).reshape(rows, -1, self.dim) for g in grads)
        dh, add = mm(run("rope_backward")(dq, dk, dv, *rotary), self.qkv)
        add(run("norm_apply")(s1, r1, self.norm1.weight), tops[0])
        ds, dw = run("norm_backward")(dh, s1, r1, self.norm1.weight, ds)
        self.add_norm_gradient(self.norm1, dw)
        self.unit.ready()
        return ds

    def add_norm_gradient(self, norm: nn.Module, dw: Tensor) -> None:
        """Norm weights' gradients, like the matrices'."""
        out = norm.weight.main_grad
        out.copy_(dw) if self.unit.fresh else out.add_(dw)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, place: tuple[Rotary, int], x: Tensor, delta: Tensor | None) -> Any:
        layer.unit.wait()
        rotary, batch = place
        s, update, ctx.kept = layer.forward(x, delta, rotary, batch)
        ctx.layer, ctx.rotary, ctx.paired = layer, rotary, delta is not None
        return s, update

    @staticmethod
    def backward(ctx: Any, gs: Tensor, gu: Tensor) -> tuple[Any, ...]:
        kept, ctx.kept = ctx.kept, None
        ds = ctx.layer.backward(kept, gs.contiguous(), gu.contiguous(), ctx.rotary)
        return None, None, ds, ds if ctx.paired else None


class _Loss(torch.autograd.Function):
    """Final norm, logits by chunks and mean cross entropy; gradients are made in forward and scaled by
    `share`.
    """

    @staticmethod
    def forward(ctx: Any, model: Model, s: Tensor, delta: Tensor, labels: Tensor) -> Tensor:
        head, unit = model.head, model.unit
        unit.wait()
        run = lambda name: ops.pick(name, s.device)  # noqa: E731
        s, h, rstd = run("add_norm")(s, delta, head.norm.weight, head.norm.eps)
        weight, dh = head.out.weight, torch.empty_like(h)
        losses, fresh = [], unit.fresh
        for rows, target, out in zip(h.split(CHUNK), labels.split(CHUNK), dh.split(CHUNK), strict=True):
            logits = rows @ weight.t()
            losses.append(run("cross_entropy_")(logits, target, model.share / len(labels)))
            torch.mm(logits, weight, out=out)
            _accumulate(weight.main_grad, logits.t(), rows, fresh=fresh)
            fresh = False
        ctx.kept = (model, dh, s, rstd)
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, _one: Tensor) -> tuple[Any, ...]:
        (model, dh, s, rstd), ctx.kept = ctx.kept, None
        norm = model.head.norm
        zero = torch.zeros_like(s)
        ds, dw = ops.pick("norm_backward", s.device)(dh, s, rstd, norm.weight, zero)
        out = norm.weight.main_grad
        out.copy_(dw) if model.unit.fresh else out.add_(dw)
        model.unit.ready()
        return None, ds, ds, None


class Model:
    """A llama.Model's function over the same weights; `share` scales the gradients of the next forward."""

    def __init__(self, model: nn.Module, *, fp8: bool) -> None:
        if model.config.tied or model.config.window:
            raise NotImplementedError("the fused layer has an untied head and full causal attention")
        matmul = Quarter() if fp8 else Half()
        self.config, self.embedding, self.head = model.config, model.embedding, model.head
        self.unit = model.head.out.weight.unit
        self.layers = [Layer(block, matmul, fp8=fp8) for block in model.blocks.values()]
        self.share = 1.0

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        batch, length = tokens.shape
        rotary = Rotary.table(length, self.config.head_dim, self.config.theta, tokens.device)
        x, delta = self.embedding(tokens).flatten(0, 1), None
        for layer in self.layers:
            x, delta = _Block.apply(layer, (rotary, batch), x, delta)
        return _Loss.apply(self, x, delta, labels.flatten())
