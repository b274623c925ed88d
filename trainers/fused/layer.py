"""The Llama layer with its backward written by hand: no compiler, no concatenation, gradients added in place.

In: a model of models/llama.py whose weights are neighbours in zero1's flat buffers. Out: the same function,
faster. Query, key and value are one product, gate and up another. The residual sum is fused with the next
norm, so a layer returns (sum, update) and the next layer adds them. Backward computes norms and SwiGLU again
from what is kept anyway. The gradient of the loss is made while a chunk of logits exists.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from errors import RefusedError
from fused import ops
from fused.products import Fp8Products, Joined, NativeProducts, accumulate
from models import llama
from models.layers import attention, window_attention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from models.layers import Rotary
    from peaks import Peak

CHUNK = 4096  # rows of logits at a time: 1 GB of bfloat16 at Llama 3's vocabulary


class Kept(NamedTuple):
    """What the backward pass of a layer needs.

    These are the two residual sums with 1/rms, attention with its graph, gate and up beside each other, and
    the largest values of the products' inputs.
    """

    s1: Tensor
    r1: Tensor
    parts: list[Tensor]
    o: Tensor
    s2: Tensor
    r2: Tensor
    gate_up: Tensor
    tops: list[Tensor | None]


class Layer:
    """The weights of one block, and its forward and backward over rows [tokens, width]."""

    def __init__(
        self, block: nn.Module, matmul: NativeProducts | Fp8Products, *, fp8: bool, again: bool
    ) -> None:
        attn, mlp = block.attention, block.mlp
        self.unit = attn.q.weight.unit
        self.norm1, self.norm2 = block.attention_norm, block.mlp_norm
        self.qkv, self.out = Joined(attn.q, attn.k, attn.v), Joined(attn.o)
        self.gate_up, self.down = Joined(mlp.gate, mlp.up), Joined(mlp.down)
        self.dim, self.window = attn.head_dim, attn.window
        self.heads, self.kv = (layer.weight.shape[0] // self.dim for layer in (attn.q, attn.k))
        self.matmul, self.fp8 = matmul, fp8
        self.again = again  # keep the residual sum alone, and compute the rest again in backward

    def top(self, x: Tensor) -> Tensor | None:
        """Where a kernel stores the largest value that it saw; FP8 needs it for scaling."""
        return torch.zeros((), device=x.device, dtype=torch.float32) if self.fp8 else None

    def forward(self, x: Tensor, delta: Tensor | None, rotary: Rotary, batch: int) -> tuple[Any, ...]:
        """The residual sum before the MLP, the MLP's update, and what the block keeps for backward."""
        kept = self.before_down(x, delta, rotary, batch)
        top = kept.tops[2]
        update = self.matmul.forward(ops.pick("swiglu", x.device)(kept.gate_up, top), self.down, top)
        return kept.s2, update, (kept.s1, kept.tops) if self.again else kept

    def before_down(self, x: Tensor, delta: Tensor | None, rotary: Rotary, batch: int) -> Kept:
        """The layer up to its last product."""
        run, mm = functools.partial(ops.pick, device=x.device), self.matmul.forward
        tops = [self.top(x) for _ in range(3)]
        s1, h, r1 = run("add_norm")(x, delta, self.norm1.weight, self.norm1.eps, tops[0])
        qkv = mm(h, self.qkv, tops[0])
        run("rope_")(qkv, *rotary, self.heads + self.kv)
        parts, o = self.attend(qkv, batch)
        rows = o.detach().transpose(1, 2).reshape(x.shape[0], -1)
        s2, h, r2 = run("add_norm")(s1, mm(rows, self.out), self.norm2.weight, self.norm2.eps, tops[1])
        return Kept(s1, r1, parts, o, s2, r2, mm(h, self.gate_up, tops[1]), tops)

    def attend(self, qkv: Tensor, batch: int) -> tuple[list[Tensor], Tensor]:
        """q, k, v [batch, heads, sequence, head_dim] as leaves, and the output with its graph.

        Only attention keeps autograd's graph: torch has the fast backward kernels.
        """
        grid = qkv.view(batch, -1, self.heads + 2 * self.kv, self.dim).transpose(1, 2)
        parts = [part.detach().requires_grad_() for part in grid.split((self.heads, self.kv, self.kv), 1)]
        with torch.enable_grad():
            q, k, v = parts
            o = window_attention(q, k, v, self.window) if self.window else attention(q, k, v)
        return parts, o

    def backward(self, kept: Kept, gs: Tensor, gu_out: Tensor, rotary: Rotary) -> Tensor:
        """Gradient of the block's input; weights' gradients go to their buffers."""
        s1, r1, parts, o, s2, r2, gu, tops = kept
        run, mm = functools.partial(ops.pick, device=gs.device), self.matmul.backward
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
        """Write or add the gradient of a norm's weight, as for the matrices."""
        out = norm.weight.main_grad
        out.copy_(dw) if self.unit.fresh else out.add_(dw)


class _Block(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, place: tuple[Rotary, int], x: Tensor, delta: Tensor | None) -> Any:
        layer.unit.wait()
        rotary, batch = place
        s, update, ctx.kept = layer.forward(x, delta, rotary, batch)
        ctx.place, ctx.paired = (layer, rotary, batch), delta is not None
        return s, update

    @staticmethod
    def backward(ctx: Any, gs: Tensor, gu: Tensor) -> tuple[Any, ...]:
        (layer, rotary, batch), kept, ctx.kept = ctx.place, ctx.kept, None
        if layer.again:
            s1, tops = kept
            kept = layer.before_down(s1, None, rotary, batch)._replace(tops=tops)
        ds = layer.backward(kept, gs.contiguous(), gu.contiguous(), rotary)
        return None, None, ds, ds if ctx.paired else None


class _Loss(torch.autograd.Function):
    """Final norm, logits by chunks, mean cross entropy. Forward makes the gradients, scaled by `share`."""

    @staticmethod
    def forward(ctx: Any, model: Model, s: Tensor, delta: Tensor, labels: Tensor) -> Tensor:
        head, unit = model.head, model.unit
        unit.wait()
        run = functools.partial(ops.pick, device=s.device)
        s, h, rstd = run("add_norm")(s, delta, head.norm.weight, head.norm.eps)
        weight, dh = head.out.weight, torch.empty_like(h)
        losses, fresh = [], unit.fresh
        for rows, target, out in zip(h.split(CHUNK), labels.split(CHUNK), dh.split(CHUNK), strict=True):
            logits = rows @ weight.t()
            losses.append(run("cross_entropy_")(logits, target, model.share / len(labels)))
            torch.mm(logits, weight, out=out)
            accumulate(weight.main_grad, logits.t(), rows, fresh=fresh)
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
    """A llama.Model's function over the same weights; `share` scales the gradients of the next forward.

    `again`: the blocks that backward computes again.
    """

    def __init__(self, model: nn.Module, peak: Peak, *, fp8: bool, again: set[nn.Module]) -> None:
        if model.config.tied:
            raise RefusedError(
                "--implementation fused needs an untied head, and this model ties it; "
                "take --implementation native"
            )
        if not all(weight.requires_grad for weight in model.parameters()):
            raise RefusedError(
                "--implementation fused trains all weights, and some are frozen; take --implementation native"
            )
        matmul = Fp8Products(fnuz=peak.fnuz) if fp8 else NativeProducts()
        self.config, self.embedding, self.head = model.config, model.embedding, model.head
        self.unit = model.head.out.weight.unit
        self.layers = [Layer(block, matmul, fp8=fp8, again=block in again) for block in model.blocks.values()]
        self.share = 1.0

    def __call__(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy."""
        batch, length = tokens.shape
        rotary = llama.rotary_of(self.config, length, tokens.device)
        x, delta = self.embedding(tokens).flatten(0, 1), None
        for layer in self.layers:
            x, delta = _Block.apply(layer, (rotary, batch), x, delta)
        return _Loss.apply(self, x, delta, labels.flatten())
