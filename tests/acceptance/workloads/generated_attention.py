"""Generated attention: masks, score functions and ranges, head sizes, grouped heads, views and backends.

In: a source of numbers. Out: a call.

The right answer is the plain formula in float64. A row that may see nothing is zero.
"""

import functools
import importlib.util
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads import arch, device, generated_flex, operands
from workloads.generated_flex import Mask
from workloads.generated_judge import FLOATS, Call
from workloads.generated_known import FAR_SCORE, largest_score

HEADS = (16, 24, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 385, 513)
MOST = {"cpu": 2**18, "cuda": 2**24}  # scores of one case
SCALES = (0.01, 1.0, 1.0, 4.0, 16.0, 16.0)  # of the queries: from even to one key for each of them
BLOCKS = ((128, 128), (128, 128), (64, 64), (256, 256), (64, 128), (128, 256), (256, 128))
BACKENDS = {
    "default": None, "math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION,
}  # fmt: skip
FLEX = ("flex", "flex compiled")
CPU_HAS = ("default", "math", "flash", "flex")
COMPILED = 24  # a case in so many is compiled, which takes as long as a hundred others
CAUSAL = "i >= j"
# Faults of a healthy torch, docs/reference/trust.md: these lose gradients where a score is larger.
LOSES_GRADIENTS = {
    **dict.fromkeys([("cpu", "flash"), ("cpu", "default"), ("cpu", "flex")], FAR_SCORE),
    **dict.fromkeys([("cuda", each) for each in ("default", "efficient", "cudnn", "flex")], 2.0**24),
}
CUDNN_FIRST = ("sm_9", "sm_10", "sm_12")  # where cuDNN's attention is, or may be, the default
NO_GRADIENTS = {("cpu", "flex"), ("cpu", "flex compiled")}  # torch says so, of queries, keys and values
FORWARD, PASSED = "torch has no gradients here", "gradients passed over"


@dataclass(frozen=True)
class Case:
    """All that makes a case. `far` is for what is learned, `gaps` for what functions read."""

    backend: str
    dtype: str
    seed: int
    batch: int = 1
    kv_heads: int = 1
    groups: int = 1
    sq: int = 1
    sk: int = 1
    head: int = 16
    layouts: tuple[str, ...] = ("contiguous",) * 3
    scales: tuple[float, float] = (1.0, 1.0)
    mask: Mask = ""
    scores: tuple[str, ...] = ()
    learned: str = "float32"
    block: tuple[int, int] = (128, 128)
    gqa: bool = False
    lse: bool = False
    empty: bool = False
    gaps: bool = False
    far: bool = False
    trained: bool = True

    def __str__(self) -> str:
        """What is not as the class says, as Python."""
        said = ((one.name, getattr(self, one.name), one.default) for one in fields(self))
        return ", ".join(f"{name}={value!r}" for name, value, default in said if value != default)

    @property
    def heads(self) -> int:
        """Of the queries."""
        return self.groups * self.kv_heads


def draw(source: random.Random, seed: int) -> Case:
    """One case."""
    on_gpu = device().type == "cuda"
    backend = source.choice((*BACKENDS, "flex") if on_gpu else CPU_HAS)
    backend = backend if source.randrange(COMPILED) else "flex compiled"
    flex = backend in FLEX
    dtype = source.choice(FLOATS[:1] if backend == "math" and not on_gpu else FLOATS)
    batch, groups, kv_heads = source.choice((1, 2, 3)), source.choice((1, 1, 2, 4)), source.choice((1, 2, 3))
    sq, sk, head = source.choice(LENGTHS), source.choice(LENGTHS), source.choice(HEADS)
    if batch * groups * kv_heads * sq * sk > MOST[device().type]:
        batch, kv_heads = 1, 1
    bias = (source.choice(generated_flex.BIASES),) * (not source.randrange(4))
    masks = ("", CAUSAL, *[generated_flex.draw_mask(source)] * 6)
    return Case(
        backend, str(dtype).removeprefix("torch."), seed, batch, kv_heads, groups, sq, sk, head,
        layouts=tuple(source.choice(list(LAYOUTS)) for _ in range(3)),
        scales=_scales(source, dtype, head),
        mask=source.choice(masks),
        scores=generated_flex.draw_scores(source) if flex else bias,
        learned=str(source.choice((dtype, torch.float32)) if flex else dtype).removeprefix("torch."),
        block=source.choice(BLOCKS),
        gqa=groups > 1 and bool(source.randrange(2)),
        lse=flex and not source.randrange(3) and (on_gpu or backend == "flex"),
        empty=flex or (not source.randrange(8) and (bool(bias) or not _sees_hidden_keys(backend))),
        gaps=not source.randrange(3),
        far=on_gpu and flex and not source.randrange(8) and backend == "flex",  # compiled: pytorch#145869
        trained=backend != "flash" and bool(source.randrange(4)),
    )  # fmt: skip


def _sees_hidden_keys(backend: str) -> bool:
    """Whether a row without a key attends to those that a mask of booleans hides, as by cuDNN's attention.

    PyTorch's page does not say what such a row gives (docs/reference/trust.md).
    """
    return backend in ("default", "cudnn") and arch.name().startswith(CUDNN_FIRST)


def _scales(source: random.Random, dtype: torch.dtype, head: int) -> tuple[float, float]:
    """Of queries and keys: as models have them, or so large that products are up to an overflow."""
    if source.randrange(4):
        return source.choice(SCALES), 1.0
    most = torch.finfo(dtype).max / 32 / math.sqrt(head)
    product, share = most ** source.random(), source.choice((0.0, 0.5, 1.0))
    return product**share, product ** (1 - share)


def made(case: Case) -> Call:
    """A case as a call."""
    dtype, on = getattr(torch, case.dtype), device().type
    kv = (case.batch, case.kv_heads, case.sk, case.head)
    shapes = ((case.batch, case.heads, case.sq, case.head), kv, kv)
    q, k, v = (
        LAYOUTS[case.layouts[n]](operands.normal(*shape, dtype=dtype, seed=case.seed + n, scale=scale))
        for n, (shape, scale) in enumerate(zip(shapes, (*case.scales, 1.0), strict=True))
    )
    sizes = (case.batch, case.heads, case.sq, case.sk, max(case.sq, case.sk), max(case.sq + case.sk, 17))
    texts, learned = f"{generated_flex.text(case.mask)} {case.scores}", getattr(torch, case.learned)
    read = generated_flex.captured(texts, sizes, learned, case.seed, gaps=case.gaps)
    forward = (on, case.backend) in NO_GRADIENTS
    loses = LOSES_GRADIENTS.get((on, case.backend), math.inf)
    passed = (loses < math.inf and largest_score(q, k) > loses) or (
        case.trained and _cannot_learn(case, read)
    )
    fixed = (0, 1, 2) * forward + tuple(range(3, 3 + len(read))) * (not case.trained)
    gradients = not passed and (on, case.backend) != ("cpu", "flex compiled")
    right = Call(
        plain, (q, k, v, read), {"case": case}, dtype, gradients, case.seed, fixed=frozenset(fixed),
        noisy=True, taken=_is_taken(case, on), smaller=functools.partial(_smaller, case),
        words=f"attention({case})" + forward * f", {FORWARD}" + passed * f", {PASSED}",
    )  # fmt: skip
    return replace(right, function=fused, right=right)


def _is_taken(case: Case, on: str) -> bool:
    """Whether torch says that it takes this: then an error is a fault. Elsewhere a refusal is loud."""
    if case.backend == "flex":
        return bool(importlib.util.find_spec("torch.nn.attention.flex_attention"))
    even = case.head in {16, 32, 64, 128} and not (case.block[0] % 128 or case.block[1] % 128)
    return case.backend == "flex compiled" and on == "cuda" and even and case.dtype != "float32"


def _cannot_learn(case: Case, read: Mapping[str, Any]) -> bool:
    """Whether FlexAttention of a healthy torch ends in an error where this is learned: pytorch#145208."""
    return case.backend in FLEX and "scalar" in read


def _smaller(case: Case) -> Iterator[Call]:
    """The case with one thing simpler, or with a smaller size."""
    others: list[dict[str, Any]] = [{"mask": mask} for mask in ("", *generated_flex.smaller(case.mask))]
    others += [{"scores": case.scores[:n] + case.scores[n + 1 :]} for n in range(len(case.scores))]
    for one in (one for one in fields(Case)[3:] if one.name != "empty"):
        size = getattr(case, one.name)
        sizes = {max(one.default, size // 2), max(one.default, size - 1)} if one.type == "int" else ()
        others += [{one.name: less} for less in (one.default, *sorted(sizes))]
    for other in others:
        if replace(case, **other) != case:
            yield made(replace(case, **other))


def fused(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: Mapping[str, torch.Tensor], *, case: Case
) -> Any:
    """PyTorch's function, by one of its backends."""
    if case.groups > 1 and not case.gqa:
        k, v = (one.repeat_interleave(case.groups, 1) for one in (k, v))
    if case.backend in FLEX:
        return _flex(q, k, v, read, case)
    causal, mask = case.mask == CAUSAL and not case.scores, None
    if (case.mask or case.scores) and not causal:
        mask = seen = _seen(case, read, q.device)
        for bias in (read[name] for name in ("bias", "whole") if name in read):
            mask = bias.masked_fill(~seen, -torch.inf)
    given = {"attn_mask": mask, "is_causal": causal, **({"enable_gqa": True} if case.gqa else {})}
    chosen = BACKENDS[case.backend]
    if chosen is None:
        return F.scaled_dot_product_attention(q, k, v, **given)
    with sdpa_kernel([chosen]):
        return F.scaled_dot_product_attention(q, k, v, **given)


def _flex(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: Mapping[str, torch.Tensor], case: Case
) -> Any:
    from torch.nn.attention import flex_attention as flex  # not every torch has it

    given = generated_flex.far_away(read, case.scores) if case.far else read
    mask, score = generated_flex.functions(case.mask, case.scores, case.sk, given)
    compiled, block = _compiled(case), None
    if mask is not None:
        body, one = generated_flex.text(case.mask), case.seed % 2  # one for all of them, where they are alike
        batch = None if one and not generated_flex.reads(body, "b") else case.batch
        heads = None if one and not generated_flex.reads(body, "h") else case.heads
        block = flex.create_block_mask(
            mask, batch, heads, case.sq, case.sk, device=str(q.device), BLOCK_SIZE=case.block
        )
    attend = compiled or flex.flex_attention
    return attend(q, k, v, score_mod=score, block_mask=block, enable_gqa=case.gqa, return_lse=case.lse)


@functools.lru_cache(1)
def _compiled(case: Case) -> Any:
    """The compiled function, if it is; no case has the code of another one, where sizes are variables."""
    from torch.nn.attention import flex_attention as flex

    torch._dynamo.reset()
    compiled = case.backend == "flex compiled"
    return torch.compile(flex.flex_attention, fullgraph=True, dynamic=False) if compiled else None


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, read: Mapping[str, torch.Tensor], *, case: Case
) -> Any:
    """The formula."""
    k, v = (one.repeat_interleave(case.groups, 1) for one in (k, v))
    scores = q @ k.mT * case.head**-0.5
    score = generated_flex.functions("", case.scores, case.sk, read)[1]
    if score is not None:
        scores = score(scores, *_places(case, q.device))
    scores = scores.masked_fill(~_seen(case, read, q.device), -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    out = scores.softmax(-1).masked_fill(empty, 0) @ v
    return (out, scores.logsumexp(-1).masked_fill(empty[..., 0], -torch.inf)) if case.lse else out


def _places(case: Case, on: torch.device) -> list[torch.Tensor]:
    """All batches, heads, queries and keys, in four dimensions."""
    counts = (case.batch, case.heads, case.sq, case.sk)
    return [torch.arange(count, device=on).view(-1, *[1] * (3 - n)) for n, count in enumerate(counts)]


def _seen(case: Case, read: Mapping[str, torch.Tensor], on: torch.device) -> torch.Tensor:
    """True where a query may see a key; unless rows may be empty, one key at least."""
    mask = generated_flex.functions(case.mask, (), case.sk, read)[0]
    seen = torch.ones(1, 1, case.sq, case.sk, dtype=torch.bool, device=on)
    if mask is not None:
        seen = seen & mask(*_places(case, on))
    if not case.empty:
        seen[..., 0] |= ~seen.any(-1)
    return seen


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
