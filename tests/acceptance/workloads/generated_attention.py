"""Generated attention: masks, score ranges, head sizes, grouped heads, views and backends.

In: a source of numbers. Out: a call.

The right answer is the plain formula in float64. A row that may see nothing is zero.
"""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads import device, operands
from workloads.generated_judge import FLOATS, Call

HEADS = (16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 385, 513)
MOST = {"cpu": 2**18, "cuda": 2**24}  # scores of one case
SCALES = (0.01, 1.0, 1.0, 4.0, 16.0, 16.0)  # of the queries: from even to one key for each of them
MASKS = ("none", "causal", "holes", "regions", "padding", "window", "empty rows", "bias", "bias with holes")
BACKENDS = {
    "default": None,
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
CPU_HAS = ("default", "math", "flash")


def draw(source: random.Random, seed: int) -> tuple[str, Call]:
    """One case, in words and as a call."""
    on_gpu = device().type == "cuda"
    backend = source.choice(list(BACKENDS) if on_gpu else CPU_HAS)
    dtype = source.choice(FLOATS[:1] if backend == "math" and not on_gpu else FLOATS)
    batch, groups, kv_heads = source.choice((1, 2, 3)), source.choice((1, 1, 2, 4)), source.choice((1, 2, 3))
    sq, sk, head = source.choice(LENGTHS), source.choice(LENGTHS), source.choice(HEADS)
    if batch * groups * kv_heads * sq * sk > MOST[device().type]:
        batch, kv_heads = 1, 1
    kind, scale = source.choice(MASKS), source.choice(SCALES)
    mask = _mask(kind, batch, sq, sk, source)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.to(dtype)
    shapes = ((batch, kv_heads * groups, sq, head), *[(batch, kv_heads, sk, head)] * 2)
    layouts = [source.choice(list(LAYOUTS)) for _ in shapes]
    q, k, v = (
        LAYOUTS[layout](
            operands.normal(*shape, dtype=dtype, seed=seed % 2**31 + n, scale=scale if not n else 1.0)
        )
        for n, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
    )
    options = {"mask": mask, "causal": kind == "causal"}
    right = Call(plain, (q, k, v), options, dtype, gradients=True, seed=seed)
    call = Call(
        fused,
        (q, k, v),
        {**options, "backend": backend},
        dtype,
        gradients=True,
        seed=seed,
        right=right,
        noisy=True,
    )
    sizes = f"{tuple(q.shape)} by {tuple(k.shape)}"
    return f"attention {backend} {dtype} {sizes}, mask {kind}, scores {scale:g}, {layouts}", call


def fused(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    causal: bool,
    backend: str,
) -> torch.Tensor:
    """PyTorch's function, by one of its backends."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
    chosen = BACKENDS[backend]
    if chosen is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
    with sdpa_kernel([chosen]):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, causal: bool
) -> torch.Tensor:
    """The formula."""
    groups = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(groups, 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0) @ v


def _mask(kind: str, batch: int, sq: int, sk: int, source: random.Random) -> torch.Tensor | None:
    """True where a query may see a key, or numbers that are added to the scores."""
    if kind in {"none", "causal"}:
        return None
    generator = torch.Generator().manual_seed(source.randrange(2**31))
    rows, columns = torch.arange(sq)[:, None], torch.arange(sk)[None]
    seen = torch.ones(batch, 1, sq, sk, dtype=torch.bool)
    if kind in {"holes", "bias with holes", "empty rows"}:
        seen &= torch.rand(seen.shape, generator=generator) < source.choice((0.1, 0.5, 0.9))
    elif kind == "regions":
        borders = torch.tensor(sorted(source.randrange(max(sq, sk)) for _ in range(3)))
        seen &= torch.bucketize(rows, borders) == torch.bucketize(columns, borders)
    elif kind == "padding":
        seen &= columns < torch.tensor([source.randrange(1, sk + 1) for _ in range(batch)]).view(-1, 1, 1, 1)
    elif kind == "window":
        seen &= (rows - columns).abs() <= source.choice((0, 1, 16, 100))
    seen[..., 0] |= ~seen.any(-1)  # one key at least
    if kind == "empty rows":
        seen[:, :, source.randrange(sq)] = False
    if not kind.startswith("bias"):
        return seen.to(device())
    bias = torch.randn(seen.shape, generator=generator).to(torch.bfloat16).float()
    return bias.masked_fill(~seen, -torch.inf).to(device())


def _in_memory(*order: int) -> Any:
    """A copy with equal numbers whose dimensions lie in memory in this order."""

    def laid(one: torch.Tensor) -> torch.Tensor:
        back = [order.index(n) for n in range(one.dim())]
        return one.permute(order).contiguous().permute(back)

    return laid


def _packed(one: torch.Tensor) -> torch.Tensor:
    whole = torch.full((*one.shape[:-1], 3, one.shape[-1]), torch.nan, dtype=one.dtype, device=one.device)
    return whole[..., 1, :].copy_(one)


LAYOUTS = {
    "contiguous": _in_memory(0, 1, 2, 3),
    "by tokens": _in_memory(0, 2, 1, 3),
    "tokens first": _in_memory(2, 0, 1, 3),
    "packed": _packed,
    "expanded": lambda one: one[:, :1].expand(one.shape),
}
