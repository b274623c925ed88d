"""The Triton kernels compute what ops.py says, on a GPU where there is one, in Triton's interpreter
elsewhere.
"""

import pytest
import torch
from agree import rounded, same_bits, same_sums

from fused import ops

GPU = torch.cuda.is_available()
pytest.importorskip("triton", reason="triton is not installed")
from fused import triton_ops as kernels  # noqa: E402 - not before it is known that triton is there

DEVICE = torch.device("cuda" if GPU else "cpu")
ROWS, WIDTH, HEADS, KV, DIM, FFN, VOCAB = 24, 96, 6, 2, 16, 100, 1000


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(7)


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    same_sums(got, want, dtype=torch.bfloat16, terms=1)  # computed in float32, rounded at the end


@pytest.mark.parametrize("second", [True, False], ids=["sum", "alone"])
def test_add_norm_and_its_backward(second):
    x, y, w = normal(ROWS, WIDTH), normal(ROWS, WIDTH) if second else None, normal(WIDTH)
    top, want_top = torch.zeros((), device=DEVICE), torch.zeros((), device=DEVICE)
    got, want = kernels.add_norm(x, y, w, 1e-5, top), ops.add_norm(x, y, w, 1e-5, want_top)
    for g, r in zip(got, want, strict=True):
        close(g, r)
    close(top, want_top)
    close(kernels.norm_apply(want[0], want[2], w), want[1])
    dh, residual = normal(ROWS, WIDTH), normal(ROWS, WIDTH)
    args = (dh, want[0], want[2], w, residual)
    for g, r in zip(kernels.norm_backward(*args), ops.norm_backward(*args), strict=True):
        close(g, r)


def test_rope_there_and_back():
    angle = torch.rand(ROWS // 2, DIM // 2, device=DEVICE) * 6
    table = (angle.cos(), angle.sin())
    qkv = normal(ROWS, (HEADS + 2 * KV) * DIM)
    got, want = qkv.clone(), qkv.clone()
    kernels.rope_(got, *table, HEADS + KV)
    ops.rope_(want, *table, HEADS + KV)
    close(got, want)
    parts = [normal(ROWS, heads, DIM) for heads in (HEADS, KV, KV)]
    close(kernels.rope_backward(*parts, *table), ops.rope_backward(*parts, *table))


def test_swiglu_and_its_backward():
    gu, da = normal(ROWS, 2 * FFN), normal(ROWS, FFN)
    tops = [torch.zeros((), device=DEVICE) for _ in range(4)]
    close(kernels.swiglu(gu, tops[0]), ops.swiglu(gu, tops[1]))
    got, want = (
        kernels.swiglu_backward_(da, gu.clone(), tops[2]),
        ops.swiglu_backward_(da, gu.clone(), tops[3]),
    )
    for g, r in zip(got, want, strict=True):
        close(g, r)
    close(tops[0], tops[1])
    close(tops[2], tops[3])


def test_cross_entropy_leaves_its_gradient():
    logits, labels = normal(ROWS, VOCAB) * 3, torch.randint(VOCAB, (ROWS,), device=DEVICE)
    labels[::3] = ops.IGNORED
    got, want = logits.clone(), logits.clone()
    close(kernels.cross_entropy_(got, labels, 0.25), ops.cross_entropy_(want, labels, 0.25))
    close(got, want)


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_adamw_steps_the_exact_weight(moments):
    exact = torch.randn(5000, device=DEVICE)
    high, low = (
        torch.empty(5000, device=DEVICE, dtype=torch.bfloat16),
        torch.empty(5000, device=DEVICE, dtype=torch.int16),
    )
    ops.split(exact, high, low)
    same_bits(ops.join(high, low), exact)
    state = [torch.rand(5000, device=DEVICE).to(moments) * 0.1 for _ in range(2)]
    gradient, scale = normal(5000), torch.tensor(0.5, device=DEVICE)
    mine, theirs = ([t.clone() for t in (high, low, *state)] for _ in range(2))
    kernels.adamw_(*mine, gradient, scale, lr=1e-2, step=3, decay=2.0)
    ops.adamw_(*theirs, gradient, scale, lr=1e-2, step=3, decay=2.0)
    # Weights, but from one gradient: no order of a sum decides a sign here.
    same_sums(ops.join(*mine[:2]), ops.join(*theirs[:2]), terms=16)
    assert not torch.equal(ops.join(*mine[:2]), exact)
    close(mine[3], theirs[3])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=["e4m3", "e5m2"])
def test_fp8_cast_and_its_transpose(dtype):
    x = normal(130, 70)
    top = kernels.amax(x)
    assert top == ops.amax(x)
    row, col, scale = kernels.cast(x, top, dtype, row=True, col=True)
    same_bits(row.float().t(), col.float())
    # Triton's interpreter rounds FP8 towards zero, a GPU to the nearest.
    rounded(row.float() * scale, x.float(), dtype, nearest=GPU)
