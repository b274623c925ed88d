"""A transformer block through torch.compile, against the same block in eager mode and in float64.

In: a dtype. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import nn

from workloads import cases, device, operands
from workloads.compiled_models import BACKEND
from workloads.gates import Reading, beside_eager

WIDTH, HEADS, HIDDEN = 64, 4, 160
LENGTHS = (128, 96, 72)
# Two compilations: one for the first length as a constant, one for all others with the length as a symbol.
MOST_COMPILATIONS = 2
FACTOR = 3.0


class Block(nn.Module):  # type: ignore[misc]  # lint runs without torch, so its classes are Any
    """Pre-norm attention and a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 2 * HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def check(dtype: str) -> dict[str, Any]:
    """No graph break, at most two compilations, and the precision of eager mode."""
    kind = operands.DTYPES[dtype]
    return cases.run(
        [
            ("no graph break", functools.partial(_unbroken, kind)),
            ("as good as eager at three lengths", functools.partial(_lengths, kind)),
        ]
    )


def _block(dtype: torch.dtype) -> Block:
    torch.manual_seed(1)
    block: Block = Block().to(device=device(), dtype=dtype)
    return block


def _data(dtype: torch.dtype, length: int) -> torch.Tensor:
    return operands.normal(2, length, WIDTH, dtype=dtype, seed=length)


def _unbroken(dtype: torch.dtype) -> Iterable[Reading]:
    torch._dynamo.reset()
    found = torch._dynamo.explain(_block(dtype))(_data(dtype, LENGTHS[0]))
    yield Reading("graph breaks", float(found.graph_break_count), 0.0, str(found.break_reasons)[:300])


def _lengths(dtype: torch.dtype) -> Iterable[Reading]:
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend(BACKEND[device().type])
    block = _block(dtype)
    fast = torch.compile(block, backend=counted)
    wide = _block(torch.float32).double()
    wide.load_state_dict(block.state_dict())
    for length in LENGTHS:
        x = _data(dtype, length)
        got, eager, ref = (_run(module, x) for module in (fast, block, wide))
        for name, index in (("out", 0), ("dx", 1), ("dw", 2)):
            tensors = got[index], ref[index], eager[index]
            yield from beside_eager(*tensors, factor=FACTOR, name=f"{length} {name}")
    count = counted.frame_count
    yield Reading("compilations too many", float(max(0, count - MOST_COMPILATIONS)), 0.0, f"{count} in all")
    if device().type == "cuda":
        yield _fused(fast, _data(dtype, LENGTHS[0]))


def _fused(fast: Any, x: torch.Tensor) -> Reading:
    """Whether the compiled code runs generated kernels; without one it would only be eager code."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        _run(fast, x)
        torch.cuda.synchronize()
    generated = [event.key for event in seen.key_averages() if event.key.startswith("triton_")]
    return Reading("generated kernels missing", float(not generated), 0.0)


def _run(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    parameter = next(p for name, p in module.named_parameters() if name.endswith("qkv.weight"))
    leaf = x.detach().to(parameter.dtype).requires_grad_()
    out = module(leaf)
    grads = torch.autograd.grad(out, (leaf, parameter), operands.normal(*x.shape, dtype=leaf.dtype, seed=9))
    return (out.detach(), *grads)
