"""FlashAttention 4 as two operators that torch can trace, compile and differentiate.

In: q, k, v [batch, sequence, heads, head_dim] in half precision on an NVIDIA GPU. Out: the same shape as q.
The package (flash-attn-4) compiles a kernel in Python when a shape is first seen, which no tracer can follow:
so the compiler sees an operator with a shape, and the call happens behind it. The package's public function
has no backward of its own, so both halves come from its `interface`, at the version that images pin. The way
of torch, `torch.nn.attention.activate_flash_attention_impl("FA4")`, fails with that version: torch 2.11 and
2.13 unpack two results where 4.0.0b36 returns five.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

INTERFACE = "flash_attn.cute.interface"
HALVES = (torch.bfloat16, torch.float16)
_NO_WINDOW = -1  # an operator has no optional windows: keys before a query's own, or all of them
_chosen = False


def installed() -> bool:
    """Whether the package is there; nothing of it is imported."""
    try:
        found = importlib.util.find_spec("flash_attn.cute")
    except ImportError:
        found = None
    return found is not None and importlib.util.find_spec("cutlass") is not None


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """Attention without a bias goes to FlashAttention 4."""
    global _chosen  # noqa: PLW0603 - like torch's own choice of a backend: of the process, around the steps
    before, _chosen = _chosen, True
    try:
        yield
    finally:
        _chosen = before


def takes(q: Tensor, bias: Tensor | None) -> bool:
    """Whether this call goes to FlashAttention 4: it was chosen, and there is no bias."""
    return _chosen and bias is None and q.dtype in HALVES


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None = None) -> Tensor:
    """Attention over [batch, heads, sequence, head_dim]; `window` counts a query's own position."""
    left = _NO_WINDOW if window is None else window - 1
    out, _ = _forward(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal, left)
    return out.transpose(1, 2)


def _interface() -> Any:
    return importlib.import_module(INTERFACE)


def _windows(causal: bool, left: int) -> dict[str, Any]:
    if left == _NO_WINDOW:
        return {"causal": causal}
    return {"causal": causal, "window_size_left": left, "window_size_right": 0}


def _run(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp [batch, heads, sequence] that backward needs."""
    with torch.no_grad():
        found = _interface()._flash_attn_fwd(q, k, v, return_lse=True, **_windows(causal, left))  # noqa: SLF001
    return found[0].contiguous(), found[1].contiguous()


def _shapes(q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int) -> tuple[Tensor, Tensor]:
    del k, causal, left
    batch, length, heads, _ = q.shape
    return (
        q.new_empty(batch, length, heads, v.shape[-1]),
        q.new_empty(batch, heads, length, dtype=torch.float32),
    )


def _run_backward(
    grad: Tensor, saved: list[Tensor], causal: bool, left: int, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, out, lse = saved
    run = _interface()._flash_attn_bwd  # noqa: SLF001
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    more = {**_windows(causal, left), "deterministic": exact}
    run(q, k, v, out, grad, lse, dq=dq, dk=dk, dv=dv, **more)
    return dq, dk, dv


def _shapes_backward(
    grad: Tensor, saved: list[Tensor], causal: bool, left: int, exact: bool
) -> tuple[Tensor, Tensor, Tensor]:
    del grad, causal, left, exact
    q, k, v = (x.new_empty(x.shape) for x in saved[:3])
    return q, k, v


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.causal, ctx.left = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    exact = torch.are_deterministic_algorithms_enabled()
    dq, dk, dv = _backward(grad, list(ctx.saved_tensors), ctx.causal, ctx.left, exact)
    return dq, dk, dv, None, None


_forward: Any = torch.library.custom_op(
    "trainers::fa4",
    _run,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool causal, int left) -> (Tensor, Tensor)",
)
_backward: Any = torch.library.custom_op(
    "trainers::fa4_backward",
    _run_backward,
    mutates_args=(),
    schema="(Tensor grad, Tensor[] saved, bool causal, int left, bool exact) -> (Tensor, Tensor, Tensor)",
)
_forward.register_fake(_shapes)
_backward.register_fake(_shapes_backward)
_forward.register_autograd(_differentiate, setup_context=_keep)
