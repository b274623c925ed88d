"""Attention over packed sequences and sliding windows. In: a way to compute it.
Out: the report of `cases.run`.

The ways are those of trainers: `mask`, a mask for PyTorch's attention; `flex` and `torch`, other functions of
PyTorch; `package`, flash_attn. `lacks` says why this machine does not have a way.
"""

import functools
import importlib.util
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import arch, attention, attention_packed, cases, device, flash_package
from workloads.gates import Reading, exact

LENGTHS = (1, 7, 128, 113, 61)
PACK = attention_packed.Pack(LENGTHS, LENGTHS, causal=True)
LENGTH, WINDOW = 256, 24
HEADS, HEAD = 2, 64
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def lacks(way: str) -> dict[str, str] | None:
    """The feature or package that this way needs and that is absent; None if it must work."""
    if way == "package" and not importlib.util.find_spec("flash_attn"):
        return {"package": "flash-attn", "reason": "the flash_attn package is not part of this stack"}
    if way == "flex" and device().type != "cuda":
        return {"feature": "gpu", "reason": "flex attention is compiled by Triton, which needs a GPU"}
    if way == "flex" and not importlib.util.find_spec("triton"):
        return {"package": "triton", "reason": "flex attention is compiled by Triton, which this stack lacks"}
    if way == "torch" and not arch.name().startswith("sm_"):
        return {"feature": "varlen_attn", "reason": "PyTorch has its varlen_attn for CUDA devices only"}
    if way == "torch" and not importlib.util.find_spec("torch.nn.attention.varlen"):
        reason = f"torch {torch.__version__} has no varlen_attn: it came with 2.10"
        return {"package": "torch>=2.10", "reason": reason}
    return None


def lacks_window(way: str) -> dict[str, str] | None:
    """The package or feature that a sliding window needs and that is absent; None if it must work."""
    if way == "package" and flash_package.available() and flash_package.uses_triton():
        reason = (
            "flash_attn's Triton kernels ignore window_size: a limit of this stack, so do not use it there"
        )
        return {"package": "flash-attn extension", "reason": reason}
    return lacks(way)


def packed(way: str) -> dict[str, Any]:
    """Several sequences in one row; each is causal and must not see the others."""
    attend = functools.partial(attention_packed.WITH[way], PACK)
    seen = attention_packed.seen(PACK)
    return cases.run(_cases(attend, sum(LENGTHS), seen, first=sum(LENGTHS[:3])))


def windowed(way: str) -> dict[str, Any]:
    """Each query sees its own key and the keys just before it."""
    return cases.run(_cases(WINDOWED[way], LENGTH, window_mask(), first=LENGTH // 2))


def _cases(attend: Attend, length: int, seen: torch.Tensor, *, first: int) -> Iterator[cases.Case]:
    for dtype, peaked in itertools.product(("bf16", "fp16"), (False, True)):
        name = f"{dtype} {'peaked' if peaked else 'normal'}"
        shape = attention.Shape(b=1, hq=HEADS, hkv=HEADS, sq=length, sk=length, d=HEAD, peaked=peaked)
        yield name, functools.partial(attention.against_float64, attend, shape, dtype, seen=seen)
        yield (
            f"{name}, what is hidden does not matter",
            functools.partial(_blind, attend, shape, dtype, seen, first),
        )


def window_mask() -> torch.Tensor:
    """(S, S): True for the query's own key and the WINDOW - 1 before it."""
    distance = torch.arange(LENGTH, device=device())[:, None] - torch.arange(LENGTH, device=device())
    return (distance >= 0) & (distance < WINDOW)


def _blind(
    attend: Attend, shape: attention.Shape, dtype: str, seen: torch.Tensor, first: int
) -> Iterable[Reading]:
    """Queries from `first` on keep their output bit for bit if keys and values beyond their view change."""
    q, k, v, _ = attention.inputs(shape, dtype)
    hidden = ~seen[first:].any(0)
    before = attend(q, k, v)[:, :, first:]
    k[:, :, hidden], v[:, :, hidden] = k[:, :, hidden] * -3, v[:, :, hidden] * 100
    yield exact(attend(q, k, v)[:, :, first:], before, name="same bits")


def _window_by_package(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return flash_package.rows(*rows, causal=True, window=WINDOW - 1).transpose(1, 2)


@functools.cache
def _flex() -> tuple[Callable[..., torch.Tensor], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def near(_batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return (query >= key) & (query - key < WINDOW)

    block = create_block_mask(near, None, None, LENGTH, LENGTH, device=str(device()))
    return torch.compile(flex_attention), block


def _window_by_flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    function, block = _flex()
    return function(q, k, v, block_mask=block)


WINDOWED: dict[str, Attend] = {
    "mask": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=window_mask()),
    "flex": _window_by_flex,
    "package": _window_by_package,
}
