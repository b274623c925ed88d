"""Scaled dot product attention, forward and backward, against float64, by backend.

In: a dtype, a backend (`default` is PyTorch's own choice) and a tier. Out: the report of `cases.run`.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from workloads import attention_reference, attention_refusals, cases, device, operands
from workloads.gates import Reading, elementwise, exact, frobenius

FORWARD, BACKWARD = 2.0, 3.0
GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One attention problem: batch, query and key/value heads, lengths, head size, mask."""

    b: int = 2
    hq: int = 4
    hkv: int = 4
    sq: int = 128
    sk: int = 128
    d: int = 64
    causal: bool = False
    peaked: bool = False

    def __str__(self) -> str:
        """The problem as the name of a case."""
        mask, kind = "causal" if self.causal else "full", "peaked" if self.peaked else "normal"
        return f"b{self.b} h{self.hq}/{self.hkv} {self.sq}x{self.sk} d{self.d} {mask} {kind}"


# Every backend is documented to support this shape. What else it may refuse is in `attention_refusals`.
COMMON = Shape(b=2, hq=2, hkv=2, sq=129, sk=129, d=128, causal=True)
SMOKE = (
    COMMON,
    Shape(b=1, hq=2, hkv=2, sq=113, sk=203),
    Shape(b=1, sq=1, sk=147, hkv=1, peaked=True),
    Shape(b=1, hq=4, hkv=2, sq=127, sk=127, d=32, causal=True, peaked=True),
)
STANDARD = (
    *SMOKE,
    *(Shape(sq=108, sk=256, d=d, causal=d % 64 == 0) for d in (32, 40, 64, 72, 96, 104, 128, 192, 256)),
    *(Shape(sq=sq, sk=sk, causal=True) for sq, sk in ((1023, 1024), (1024, 1023), (113, 203))),
    *(Shape(b=1, sq=2048, sk=2048, hq=8, hkv=h, d=128, causal=True, peaked=h == 1) for h in (8, 2, 1)),
    Shape(b=1, hq=2, hkv=2, sq=16, sk=100_000),
    Shape(b=61, hq=2, hkv=1, sq=129, sk=129, causal=True),
)


def check(dtype: str, tier: str, backend: str = "default") -> dict[str, Any]:
    """The shapes of the tier for which the backend has a kernel, and the exact cases."""
    with forced(backend):
        if not _has_kernel(COMMON, dtype, backend):
            raise AssertionError(f"{backend} attention refuses {COMMON} in {dtype}, which it must support")
        shapes = [s for s in (STANDARD if cases.thorough(tier) else SMOKE) if _has_kernel(s, dtype, backend)]
        return cases.run(_cases(shapes, dtype))


def forced(backend: str) -> contextlib.AbstractContextManager[None]:
    """Allow only this backend; `default` leaves the choice to PyTorch."""
    if backend == "default":
        return contextlib.nullcontext()
    only: contextlib.AbstractContextManager[None] = sdpa_kernel(
        [getattr(SDPBackend, f"{backend.upper()}_ATTENTION" if backend != "math" else "MATH")]
    )
    return only


def _has_kernel(shape: Shape, dtype: str, backend: str) -> bool:
    if backend == "default":
        return True
    leaves, _ = leaves_of(shape, dtype)
    attempt = functools.partial(attend, *leaves, causal=shape.causal)
    return not attention_refusals.refused(backend, shape, attempt)


def _cases(shapes: list[Shape], dtype: str) -> Iterator[cases.Case]:
    for shape in shapes:
        call = functools.partial(attend, causal=shape.causal)
        yield str(shape), functools.partial(against_float64, call, shape, dtype, causal=shape.causal)
    if shapes:  # without a shape the report is empty, which fails the check
        yield "uniform keys are averaged exactly", functools.partial(_uniform, dtype)
        yield "one-hot keys select their value", functools.partial(_one_hot, dtype)
        yield "gradient with strides", functools.partial(_strided_gradient, dtype)
        yield "NaN in a value reaches every query", functools.partial(_nan, dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
    """The function under test, as a trainer calls it; tensors are (B, H, S, D)."""
    k, v, grouped = for_queries(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, **grouped)


def for_queries(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, bool]]:
    """Keys and values for grouped queries, and the option that says so.
    Before 2.5 PyTorch has none, and trainers repeat the keys.
    """
    times = q.shape[1] // k.shape[1]
    if times == 1:
        return k, v, {}
    if attention_refusals.release() >= (2, 5):
        return k, v, {"enable_gqa": True}
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1), {}


def inputs(shape: Shape, dtype: str) -> tuple[torch.Tensor, ...]:
    """q, k, v and the output's gradient; peaked multiplies q by four."""
    kind = operands.DTYPES[dtype]
    q = operands.normal(
        shape.b, shape.hq, shape.sq, shape.d, dtype=kind, seed=1, scale=4.0 if shape.peaked else 1.0
    )
    k = operands.normal(shape.b, shape.hkv, shape.sk, shape.d, dtype=kind, seed=2)
    v = operands.normal(shape.b, shape.hkv, shape.sk, shape.d, dtype=kind, seed=3)
    return q, k, v, operands.normal(shape.b, shape.hq, shape.sq, shape.d, dtype=kind, seed=4)


def leaves_of(shape: Shape, dtype: str) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v as leaves, and the output's gradient."""
    *qkv, g = inputs(shape, dtype)
    return [tensor.requires_grad_() for tensor in qkv], g


def against_float64(
    call: Callable[..., torch.Tensor],
    shape: Shape,
    dtype: str,
    *,
    causal: bool = False,
    seen: torch.Tensor | None = None,
) -> Iterable[Reading]:
    """The readings of a way to attend, forward and backward; `call` takes q, k and v."""
    leaves, g = leaves_of(shape, dtype)
    out = call(*leaves)
    out.backward(g)
    yield from judge(out.detach(), leaves, g, causal=causal, seen=seen)


def judge(
    out: torch.Tensor,
    leaves: list[torch.Tensor],
    g: torch.Tensor,
    *,
    causal: bool,
    seen: torch.Tensor | None = None,
) -> Iterable[Reading]:
    """Gates (a) and (b) of `workloads.gates` for the output and each gradient."""
    q, k, v = (leaf.detach() for leaf in leaves)
    reference = attention_reference.compute(q, k, v, g, causal=causal, seen=seen)
    eager = attention_reference.eager(q, k, v, g, causal=causal, seen=seen)
    terms = max(out.shape[-2], leaves[1].shape[-2])  # the longest sum in any of the four
    spreads = [slack / attention_reference.SPREAD for slack in reference.slack]
    yield frobenius(
        out, reference.out, eager[0], factor=FORWARD, terms=terms, spread=spreads[0], name="out frobenius"
    )
    yield elementwise(out, reference.out, reference.slack[0], name="out elementwise")
    for index, name in enumerate(GRADIENTS):
        grad, ref = operands.gradient(leaves[index], name), reference.grads[index]
        yield frobenius(
            grad, ref, eager[index + 1], factor=BACKWARD, terms=terms, spread=spreads[index + 1],
            name=f"{name} frobenius",
        )  # fmt: skip
        yield elementwise(grad, ref, reference.slack[index + 1], name=f"{name} elementwise")


def _uniform(dtype: str) -> Iterable[Reading]:
    """With equal scores the output is the mean of the values: a sum of integers over a power of two."""
    kind = operands.DTYPES[dtype]
    q = torch.zeros(2, 4, 64, 64, dtype=kind, device=device())
    k = operands.normal(2, 4, 256, 64, dtype=kind, seed=5)
    v = operands.integers(2, 4, 256, 64, dtype=kind, seed=6, density=0.3)
    expected = v.double().mean(dim=2, keepdim=True).expand(2, 4, 64, 64)
    yield exact(attend(q, k, v, causal=False), expected)


def _one_hot(dtype: str) -> Iterable[Reading]:
    """With scores far apart one key takes all.
    So each query must return exactly that key's value in its head.
    """
    kind = operands.DTYPES[dtype]
    size = 64
    eye = torch.eye(size, dtype=kind, device=device()).expand(2, 4, size, size)
    v = operands.counting(2, 4, size, size, dtype=kind, modulus=251)
    order = torch.arange(size, device=device()).flip(0)
    yield exact(attend(eye[:, :, order] * 2048, eye, v, causal=False), v[:, :, order], name="full")
    yield exact(attend(eye * 2048, eye, v, causal=True), v, name="causal diagonal")


def _strided_gradient(dtype: str) -> Iterable[Reading]:
    *qkv, g = inputs(Shape(b=1, causal=True), dtype)
    strided = g.transpose(1, 2).contiguous().transpose(1, 2)
    leaves = [tensor.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for tensor in qkv]
    out = attend(*leaves, causal=True)
    out.backward(strided)
    yield from judge(out.detach(), leaves, g, causal=True)


def _nan(dtype: str) -> Iterable[Reading]:
    q, k, v, _ = inputs(Shape(b=1, hq=2, hkv=2), dtype)
    v[0, 1, 17, 5] = float("nan")
    out = attend(q, k, v, causal=False)
    yield Reading("queries without the NaN", float((~out[0, 1, :, 5].isnan()).sum()), 0.0)
    yield Reading("NaN in the other head", float(out[0, 0].isnan().sum()), 0.0)
