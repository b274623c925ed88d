"""Attention in the shapes that models have, forward and backward, against float64.

In: a way to compute it, a dtype and a tier. Out: the report of `cases.run`. The ways are PyTorch's own choice
(`default`), each of its backends, `flex` and the flash_attn package.

Padded batches, masks as booleans and as numbers, lengths beside multiples of 64 and 128, grouped heads, V
alone a view, scores far from 0, outlier channels and long windows. Every judged row has a key: PyTorch's page
of `scaled_dot_product_attention` does not say what a row without a key gives, so such rows are not judged.
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from workloads import (
    attention,
    attention_masks,
    attention_reference,
    attention_refusals,
    cases,
    device,
    flash_package,
    operands,
)
from workloads.attention import Shape, for_queries
from workloads.gates import Reading, elementwise

Mask = Literal["none", "causal", "all true", "left padded", "right padded", "window"]
Form = Literal["bool", "min", "inf"]
Attend = Callable[..., torch.Tensor]

WAYS = ("default", "math", "flash", "efficient", "cudnn", "flex", "package")
# Float64 references of more scores than this are computed one key head after the other.
MOST_SCORES = 1 << 25


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem of a model; `shift` is added to every score, which must not change the result."""

    shape: Shape
    mask: Mask = "none"
    form: Form = "bool"
    shift: int = 0
    window: int = 0
    outliers: bool = False
    v_is_view: bool = False

    def __str__(self) -> str:
        """The problem as the name of a case."""
        shape = self.shape
        kind = f"{self.mask} {self.window or ''}".strip()
        form = "" if self.mask in {"none", "causal", "all true"} else f" as {self.form}"
        more = (" outlier channels" if self.outliers else "") + (" V a view" if self.v_is_view else "")
        size = f"b{shape.b} h{shape.hq}/{shape.hkv} {shape.sq}x{shape.sk} d{shape.d}"
        return f"{size} {kind}{form} scores {self.shift:+d}{more}"


def _square(length: int) -> Shape:
    return Shape(b=2, hq=2, hkv=2, sq=length, sk=length)


LENGTHS = (62, 64, 127, 129, 192, 320, 704, 1088)
SMOKE_LENGTHS = (64, 192, 704, 1088)
CPU_LENGTHS = (64, 127)
MASKS: tuple[tuple[Mask, Form], ...] = (
    ("none", "bool"), ("causal", "bool"), ("all true", "bool"), ("left padded", "bool"),
    ("left padded", "min"), ("right padded", "bool"), ("right padded", "inf"),
)  # fmt: skip
# Log-sum-exp below -88 leaves the range of exp in float32, as scores of trained models do.
FAR = (-120, 120)
# The trainers' attention: rotary embedding makes q and k contiguous, and V stays a view of its projection.
TRAINERS = Shape(b=1, hq=32, hkv=8, sq=2048, sk=2048, d=128)
# Window, length and query heads: windows of models, at lengths beyond them.
WINDOWS = ((1024, 4096, 2), (4096, 4800, 1))
SMALL_WINDOWS = ((24, 127, 2),)
CPU_TRAINERS = replace(TRAINERS, sq=96, sk=96)


def problems(tier: str) -> tuple[Problem, ...]:
    """The problems of a tier; a CPU gets short ones."""
    gpu = device().type == "cuda"
    lengths = (LENGTHS if cases.thorough(tier) else SMOKE_LENGTHS) if gpu else CPU_LENGTHS
    shifts = (0, *FAR) if cases.thorough(tier) else FAR[:1]
    grid = tuple(
        Problem(shape=_square(length), mask=mask, form=form, shift=shift, v_is_view=number % 2 == 1)
        for length in lengths
        for number, (mask, form) in enumerate(MASKS)
        for shift in shifts
    )
    model = TRAINERS if gpu else CPU_TRAINERS
    long = lengths[-1]
    return (
        *grid,
        Problem(shape=Shape(hq=2, hkv=2, sq=64, sk=long), mask="right padded", form="min"),
        Problem(shape=Shape(hq=2, hkv=2, sq=long, sk=64), mask="right padded", form="inf"),
        Problem(shape=Shape(hq=2, hkv=2, sq=1, sk=long), mask="left padded"),
        Problem(shape=Shape(hq=2, hkv=2, sq=1, sk=128), shift=FAR[0]),
        Problem(shape=_square(lengths[-2]), mask="causal", outliers=True, v_is_view=True),
        Problem(shape=_square(lengths[-2]), mask="left padded", form="min", outliers=True, shift=FAR[0]),
        Problem(shape=_square(lengths[0]), mask="left padded", shift=FAR[1]),
        Problem(shape=model, mask="causal", v_is_view=True),
        Problem(shape=model, mask="causal", v_is_view=True, shift=FAR[0]),
        Problem(shape=replace(model, sq=lengths[-2], sk=lengths[-2]), mask="left padded", v_is_view=True),
        *(_window(*one) for one in (WINDOWS if cases.thorough(tier) else SMALL_WINDOWS)),
    )


def _window(window: int, length: int, hq: int) -> Problem:
    return Problem(shape=Shape(b=1, hq=hq, hkv=1, sq=length, sk=length, d=128), mask="window", window=window)


def _flex_problems(tier: str, dtype: str) -> tuple[Problem, ...]:
    """Few shapes, because each of them is compiled."""
    padded = tuple(Problem(shape=_square(704), mask="left padded", shift=shift) for shift in (0, *FAR))
    if dtype != "bf16" or not cases.thorough(tier):
        return padded
    return (*padded, _window(*WINDOWS[-1]), Problem(shape=TRAINERS, mask="causal", v_is_view=True))


def lacks(way: str) -> dict[str, str] | None:
    """The feature or package that this way needs and that is absent; None if it must work."""
    return attention_masks.lacks(way) if way in {"flex", "package"} else None


def check(way: str, dtype: str, tier: str) -> dict[str, Any]:
    """Every problem of the tier that the way does not refuse for a documented reason."""
    with attention.forced(way if way in attention_refusals.MAY_REFUSE else "default"):
        wanted = _flex_problems(tier, dtype) if way == "flex" else problems(tier)
        return cases.run(_cases(way, dtype, [one for one in wanted if _takes(way, one, dtype)]))


def _cases(way: str, dtype: str, wanted: list[Problem]) -> Iterator[cases.Case]:
    for problem in wanted:
        yield str(problem), functools.partial(_against_float64, WITH[way], problem, dtype)
    if way != "flex" and any(problem.mask == "left padded" for problem in wanted):
        yield "rows without a key leave the others alone", functools.partial(_keyless, dtype)
    if way in {"default", "cudnn"}:  # the others compare the dtypes, and refuse
        yield "a float32 mask beside 16 bits is right or refused", functools.partial(_wide_mask, dtype)


def _takes(way: str, problem: Problem, dtype: str) -> bool:
    if way == "package":  # it has no masks, but windows
        return problem.mask in {"none", "causal", "window"}
    if way in {"default", "flex"}:
        return True
    if way == "math" and problem.shift and attention_refusals.release() < (2, 5):
        return False  # before 2.5 it rounds scores to the operands' dtype, so far scores lose their digits
    leaves, _ = _tensors(problem, dtype)
    masked = _argument(problem, leaves[0].dtype) is not None
    shape = replace(problem.shape, causal=problem.mask == "causal")
    attempt = functools.partial(WITH[way], problem, *leaves)
    return not attention_refusals.refused(way, shape, attempt, masked=masked)


def _tensors(problem: Problem, dtype: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v as leaves, and the output's gradient, which a model gives as a view."""
    q, k, v, g = attention.inputs(problem.shape, dtype)
    if problem.outliers:
        q[..., 5], k[..., 5], v[..., 9] = q[..., 5] * 4, k[..., 5] * 16, v[..., 9] * 64
    if problem.shift:
        # A constant channel: its product over the root of D is the shift. Whole numbers are exact.
        size = round((abs(problem.shift) * problem.shape.d**0.5) ** 0.5)
        q[..., 0], k[..., 0] = size, size if problem.shift > 0 else -size
    if problem.v_is_view:
        v, g = _as_view(v), _as_view(g)
    return [tensor.requires_grad_() for tensor in (q, k, v)], g


def _as_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in the memory of a (B, S, H, D) tensor."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def seen(problem: Problem) -> torch.Tensor | None:
    """Which keys each query sees: (B, 1, Sq, Sk), or None for all of them."""
    if problem.mask == "none":
        return None
    shape = problem.shape
    query = torch.arange(shape.sq, device=device())[:, None] + shape.sk - shape.sq
    key = torch.arange(shape.sk, device=device())
    # Members of a batch have different lengths: the first is nearly full, and each next one is much shorter.
    length = shape.sk - 5 - torch.arange(shape.b, device=device()).view(-1, 1, 1, 1) * (shape.sk // 3)
    rules: dict[Mask, Callable[[], torch.Tensor]] = {
        "causal": lambda: key <= query,
        "all true": lambda: key >= 0,
        # A padded query sees itself, as trainers arrange it, so that no row is empty.
        "left padded": lambda: ((key >= shape.sk - length) & (key <= query)) | (key == query),
        "right padded": lambda: key < length,
        "window": lambda: (key <= query) & (query - key < problem.window),
    }
    return rules[problem.mask]().expand(shape.b, 1, shape.sq, shape.sk)


def _argument(problem: Problem, dtype: torch.dtype) -> torch.Tensor | None:
    """The mask as PyTorch's attention takes it; `None` if a flag stands for the mask or nothing is masked."""
    visible = None if problem.mask == "causal" else seen(problem)
    if visible is None or problem.form == "bool":
        return visible if visible is None else visible.contiguous()
    hidden = torch.finfo(dtype).min if problem.form == "min" else float("-inf")
    return torch.zeros(visible.shape, dtype=dtype, device=device()).masked_fill(~visible, hidden)


def _by_torch(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    k, v, grouped = for_queries(q, k, v)
    mask = _argument(problem, q.dtype)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=problem.mask == "causal", **grouped
    )


def _by_package(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
    window = problem.window - 1 if problem.mask == "window" else None
    out = flash_package.rows(*rows, causal=problem.mask in {"causal", "window"}, window=window)
    return out.transpose(1, 2)


@functools.cache
def _flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False)
    return compiled


def _by_flex(problem: Problem, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask

    visible, grouped = seen(problem), q.shape[1] != k.shape[1]
    if visible is None:
        return _flex()(q, k, v, enable_gqa=grouped)
    visible = visible.contiguous()

    def rule(batch: Any, _head: Any, query: Any, key: Any) -> Any:
        return visible[batch, 0, query, key]

    shape = problem.shape
    block = create_block_mask(rule, shape.b, None, shape.sq, shape.sk, device=str(device()))
    return _flex()(q, k, v, block_mask=block, enable_gqa=grouped)


WITH: dict[str, Attend] = {
    **dict.fromkeys(("default", "math", "flash", "efficient", "cudnn"), _by_torch),
    "flex": _by_flex,
    "package": _by_package,
}


def _against_float64(attend: Attend, problem: Problem, dtype: str) -> Iterable[Reading]:
    leaves, g = _tensors(problem, dtype)
    out = attend(problem, *leaves)
    out.backward(g)
    scores = problem.shape.b * problem.shape.hq * problem.shape.sq * problem.shape.sk
    for each_out, each, each_g in _by_heads(out.detach(), leaves, g, together=scores <= MOST_SCORES):
        yield from attention.judge(each_out, each, each_g, causal=False, seen=seen(problem))


def _by_heads(
    out: torch.Tensor, leaves: list[torch.Tensor], g: torch.Tensor, *, together: bool
) -> Iterator[tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]]:
    """(out, q, k, v with their gradients, g) of all heads, or of one key head and its queries at a time."""
    if together:
        yield out, leaves, g
        return
    groups = out.shape[1] // leaves[1].shape[1]
    for head in range(leaves[1].shape[1]):
        queries, keys = slice(head * groups, (head + 1) * groups), slice(head, head + 1)
        parts = (_part(leaf, part) for leaf, part in zip(leaves, (queries, keys, keys), strict=True))
        yield out[:, queries], list(parts), g[:, queries]


def _part(leaf: torch.Tensor, heads: slice) -> torch.Tensor:
    part = leaf.detach()[:, heads]
    part.grad = operands.gradient(leaf, "a gradient")[:, heads]
    return part


def _wide_mask(dtype: str) -> Iterable[Reading]:
    """PyTorch's page asks for a mask of the operands' dtype: float32 may be refused, but never misread."""
    problem = Problem(shape=_square(64), mask="left padded", form="min")
    leaves, g = _tensors(problem, dtype)
    mask = _argument(problem, torch.float32)
    try:
        out = F.scaled_dot_product_attention(*leaves, attn_mask=mask)
    except RuntimeError as error:
        known = re.search(r"dtype|no available kernel", str(error), re.IGNORECASE)
        yield Reading("refusals for another reason", float(not known), 0.0, str(error)[:200])
        return
    out.backward(g)
    yield from attention.judge(out.detach(), leaves, g, causal=False, seen=seen(problem))


def _keyless(dtype: str) -> Iterable[Reading]:
    """Padded queries of a causal batch without any key: the outputs of all other rows are right."""
    shape = _square(64)
    q, k, v, g = attention.inputs(shape, dtype)
    place = torch.arange(shape.sk, device=device())
    first = torch.tensor([5, 31], device=device()).view(-1, 1, 1, 1)  # the first token of each member
    visible = (place >= first) & (place <= place[:, None])
    keyless = ~visible.any(-1, keepdim=True)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
    filled = visible | (keyless & torch.eye(shape.sk, dtype=torch.bool, device=device()))
    reference = attention_reference.compute(q, k, v, g, causal=False, seen=filled)
    rows = (~keyless.squeeze(-1)).expand(out.shape[:-1])
    on = rows.to(reference.out.device)
    yield elementwise(out[rows], reference.out[on], reference.slack[0][on], name="rows with keys")
