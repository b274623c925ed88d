"""Triton kernels of its own, launched on the device: products, chains of products, reductions, every tile.

In: a group of kernels. Out: the report of `cases.run`. A compiler that makes the right instructions can
still move numbers to the wrong lanes: Triton 3.4 to 3.7.0 did so on sm_90 where the result of products is
turned and multiplied again (fla-org/flash-linear-attention#640).
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from workloads import cases, device, gemm, operands
from workloads.gates import Reading, elementwise, exact, frobenius, unit_roundoff
from workloads.reference import float64

SPREAD = 8.0  # as in attention_reference: independent roundings, eight times their root sum of squares
EXPONENTIAL = 2.0**-20  # hardware exp2 is good to a few units of float32


class Tile(NamedTuple):
    """The block of one program, and how many warps and stages compute it."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        """The problem as the name of a case."""
        return f"{self.rows}x{self.columns}x{self.depth} by {self.warps} warps in {self.stages} stages"


TILES = (Tile(64, 64, 32, 4, 2), Tile(128, 128, 32, 8, 3), Tile(128, 64, 64, 4, 3), Tile(64, 256, 32, 8, 2))
SHAPES = ((256, 256, 512), (200, 136, 328))
SIDE, LONG = 64, 4  # of a tile in a chain, and how many of them are added up
WARPS = (4, 8)
WIDTH = 1000


# Triton takes annotations of its kernels for types of its own, so the kernels carry none.
@triton.jit  # type: ignore[untyped-decorator]
def product(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    a, b, c, m, n, k, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """One tile of c = a @ b; with TRANSPOSED, b is stored as (n, k) and turned in registers."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, k, DEPTH):
        depth = start + inner
        x = tl.load(
            a + row[:, None] * k + depth[None, :], mask=(row < m)[:, None] & (depth < k)[None, :], other=0.0
        )
        if TRANSPOSED:
            flipped = tl.load(
                b + column[:, None] * k + depth[None, :],
                mask=(column < n)[:, None] & (depth < k)[None, :],
                other=0.0,
            )
            y = tl.trans(flipped)
        else:
            y = tl.load(
                b + depth[:, None] * n + column[None, :],
                mask=(depth < k)[:, None] & (column < n)[None, :],
                other=0.0,
            )
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (row < m)[:, None] & (column < n)[None, :]
    tl.store(c + row[:, None] * n + column[None, :], total.to(c.dtype.element_ty), mask=inside)


CONFIGS = [
    triton.Config(
        {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth},
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    for tile in TILES
]


@triton.jit  # type: ignore[untyped-decorator]
def chain(a, b, c, out, SIDE: tl.constexpr):  # type: ignore[no-untyped-def]
    """A tile of (a @ b) @ c, the first product rounded to the operands' type, as attention does."""
    row = tl.program_id(0) * SIDE + tl.arange(0, SIDE)
    place = tl.arange(0, SIDE)
    square = place[:, None] * SIDE + place[None, :]
    x = tl.load(a + row[:, None] * SIDE + place[None, :])
    first = tl.dot(x, tl.load(b + square), input_precision="ieee")
    second = tl.dot(first.to(x.dtype), tl.load(c + square), input_precision="ieee")
    tl.store(out + row[:, None] * SIDE + place[None, :], second.to(x.dtype))


@triton.jit  # type: ignore[untyped-decorator]
def twice(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    a, b, c, d, out, long, SIDE: tl.constexpr
):
    """Two products for each step into one accumulator, one of them of a turned tile.

    As backward kernels of linear attention do.
    """
    place = tl.arange(0, SIDE)
    square = place[:, None] * SIDE + place[None, :]
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for step in range(long):
        start = (tl.program_id(0) * long + step) * SIDE * SIDE
        total += tl.dot(tl.load(a + start + square), tl.load(b + start + square), input_precision="ieee")
        flipped = tl.trans(tl.load(c + start + square))
        total += tl.dot(flipped, tl.load(d + start + square), input_precision="ieee")
    tl.store(out + tl.program_id(0) * SIDE * SIDE + square, total.to(out.dtype.element_ty))


@triton.jit  # type: ignore[untyped-decorator]
def turned(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    a, b, c, d, e, out, other, long, SIDE: tl.constexpr
):
    """s = sum of a @ b.T, then out = c @ d.T + s @ e and other = d @ c.T + s.T @ e.

    The first product of each stays an accumulator, to which the second is added. `s` is rounded once.
    """
    place = tl.arange(0, SIDE)
    square = place[:, None] * SIDE + place[None, :]
    total = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    straight = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    crossed = tl.zeros((SIDE, SIDE), dtype=tl.float32)
    for step in range(long):
        start = (tl.program_id(0) * long + step) * SIDE * SIDE
        x, y = tl.load(c + start + square), tl.load(d + start + square)
        total += tl.dot(
            tl.load(a + start + square), tl.trans(tl.load(b + start + square)), input_precision="ieee"
        )
        straight += tl.dot(x, tl.trans(y), input_precision="ieee")
        crossed += tl.dot(y, tl.trans(x), input_precision="ieee")
    last = tl.load(e + square)
    total = tl.where(place[:, None] >= place[None, :], total, 0.0)  # causal, as attention within a chunk
    small = total.to(last.dtype)
    straight += tl.dot(small, last, input_precision="ieee")
    crossed += tl.dot(tl.trans(small), last, input_precision="ieee")
    tl.store(out + tl.program_id(0) * SIDE * SIDE + square, straight)
    tl.store(other + tl.program_id(0) * SIDE * SIDE + square, crossed)


@triton.jit  # type: ignore[untyped-decorator]
def reductions(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    x, sums, largest, places, weights, running, width, BLOCK: tl.constexpr
):
    """Sum, maximum and its place, softmax and prefix sums of one row."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(x + tl.program_id(0) * width + column, mask=inside, other=0.0).to(tl.float32)
    hidden = tl.where(inside, row, -float("inf"))
    top = tl.max(hidden, 0)
    scaled = tl.exp(hidden - top)
    tl.store(sums + tl.program_id(0), tl.sum(row, 0))
    tl.store(largest + tl.program_id(0), top)
    tl.store(places + tl.program_id(0), tl.argmax(hidden, 0))
    tl.store(weights + tl.program_id(0) * width + column, scaled / tl.sum(scaled, 0), mask=inside)
    tl.store(running + tl.program_id(0) * width + column, tl.cumsum(row, 0), mask=inside)


def check(group: str) -> dict[str, Any]:
    """Every kernel of a group against float64."""
    return cases.run(GROUPS[group]())


def half() -> str:
    """The format of 16 bits under test: Triton's interpreter, which runs kernels on a CPU, has no bf16."""
    return "bf16" if device().type == "cuda" else "fp16"


def _products() -> Iterator[cases.Case]:
    for m, n, k in SHAPES:
        for tile in TILES:
            yield f"{m}x{n}x{k} in {tile}", functools.partial(_product, m, n, k, tile, half())
        for dtype in ("fp16", "fp32"):
            yield f"{m}x{n}x{k} {dtype}", functools.partial(_product, m, n, k, TILES[0], dtype)
        for tile in TILES[:2]:
            call = functools.partial(_product, m, n, k, tile, half(), transposed=True)
            yield f"{m}x{n}x{k} transposed in {tile}", call
        yield f"{m}x{n}x{k} in the fastest tile", functools.partial(_tuned, m, n, k)
    yield "exact integers in every tile", _integers


def _chains() -> Iterator[cases.Case]:
    for dtype in dict.fromkeys((half(), "fp16")):
        for warps in WARPS:
            yield f"chained {dtype}, {warps} warps", functools.partial(_chained, dtype, warps)
            yield f"accumulated twice {dtype}, {warps} warps", functools.partial(_twice, dtype, warps)
            yield f"turned and multiplied {dtype}, {warps} warps", functools.partial(_turned, dtype, warps)


def _sums() -> Iterator[cases.Case]:
    for dtype in ("fp32", half()):
        yield f"reductions {dtype}", functools.partial(_reductions, dtype)


GROUPS = {"products": _products, "chains": _chains, "reductions": _sums}


def multiply(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, tile: Tile, *, transposed: bool = False
) -> None:
    """The launch under test: out = a @ b, or a @ b.T with a b that is stored as (n, k)."""
    (m, k), n = a.shape, out.shape[1]
    grid = (triton.cdiv(m, tile.rows), triton.cdiv(n, tile.columns))
    blocks = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    product[grid](a, b, out, m, n, k, TRANSPOSED=transposed, **blocks, **options)


def _operands(m: int, n: int, k: int, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    kind = operands.DTYPES[dtype]
    return operands.normal(m, k, dtype=kind, seed=m + k), operands.normal(k, n, dtype=kind, seed=n + k)


def _product(
    m: int, n: int, k: int, tile: Tile, dtype: str, *, transposed: bool = False
) -> Iterable[Reading]:
    a, b = _operands(m, n, k, dtype)
    out, whole = operands.guarded(m, n, dtype=a.dtype)
    multiply(a, b.t().contiguous() if transposed else b, out, tile, transposed=transposed)
    yield from gemm.judge(out, a, b, dtype=dtype)
    yield Reading("guard band", operands.guards_touched(out, whole), 0)


@functools.cache
def _tuner() -> Any:
    return triton.autotune(configs=CONFIGS, key=["m", "n", "k"])(product)


def tuned(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """The same in the tile that Triton's tuner finds the fastest."""
    (m, k), n = a.shape, out.shape[1]

    def grid(meta: Any) -> tuple[int, int]:
        return triton.cdiv(m, meta["ROWS"]), triton.cdiv(n, meta["COLUMNS"])

    _tuner()[grid](a, b, out, m, n, k, TRANSPOSED=False)


def _tuned(m: int, n: int, k: int) -> Iterable[Reading]:
    a, b = _operands(m, n, k, half())
    out = operands.with_nan(torch.empty(m, n, dtype=a.dtype, device=a.device))
    tuned(a, b, out)
    yield from gemm.judge(out, a, b, dtype=half())


def _integers() -> Iterable[Reading]:
    kind = operands.DTYPES[half()]
    a = operands.integers(200, 328, dtype=kind, seed=1, density=0.15)
    b = operands.integers(328, 136, dtype=kind, seed=2, density=0.5)
    x, y = float64(a, b)
    for tile in TILES:
        out = operands.with_nan(torch.empty(200, 136, dtype=a.dtype, device=a.device))
        multiply(a, b, out, tile)
        yield exact(out, x @ y, name=str(tile))


def _chained(dtype: str, warps: int) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    a = operands.normal(3 * SIDE, SIDE, dtype=kind, seed=3)
    b, c = (operands.normal(SIDE, SIDE, dtype=kind, seed=seed, scale=SIDE**-0.5) for seed in (4, 5))
    out = operands.with_nan(torch.empty_like(a))
    chain[3,](a, b, c, out, SIDE=SIDE, num_warps=warps)
    x, y, z = float64(a, b, c)
    first = x @ y
    slack = SPREAD * unit_roundoff(kind) * (first.square() @ z.square()).sqrt() + gemm.slack(first, z, dtype)
    eager = ((a.float() @ b.float()).to(kind).float() @ c.float()).to(kind)
    yield frobenius(out, first @ z, eager, factor=gemm.FORWARD)
    yield elementwise(out, first @ z, slack)


def _twice(dtype: str, warps: int) -> Iterable[Reading]:
    kind, count = operands.DTYPES[dtype], 2
    a, b, c, d = (operands.normal(count, LONG, SIDE, SIDE, dtype=kind, seed=seed) for seed in range(6, 10))
    out = operands.with_nan(torch.empty(count, SIDE, SIDE, dtype=kind, device=a.device))
    twice[count,](a, b, c, d, out, LONG, SIDE=SIDE, num_warps=warps)
    for number in range(count):
        left = torch.cat([*a[number], *(tile.t() for tile in c[number])], 1)
        right = torch.cat([*b[number], *d[number]])
        yield from gemm.judge(out[number], left, right, dtype=dtype, name=f"program {number} ")


def _turned(dtype: str, warps: int) -> Iterable[Reading]:
    kind, count = operands.DTYPES[dtype], 2
    a, b, c, d = (operands.normal(count, LONG, SIDE, SIDE, dtype=kind, seed=seed) for seed in range(12, 16))
    e = operands.normal(SIDE, SIDE, dtype=kind, seed=16)
    got = [torch.full((count, SIDE, SIDE), float("nan"), device=a.device) for _ in range(2)]
    turned[count,](a, b, c, d, e, *got, LONG, SIDE=SIDE, num_warps=warps)
    for number in range(count):
        w, x, y, z = float64(*(torch.cat([*tensor[number]], 1) for tensor in (a, b, c, d)))
        s, last = (w @ x.mT).tril(), e.double().to(w.device)
        rounding = SPREAD * unit_roundoff(kind)
        for name, out, first, turn in (("s @ e", got[0], y @ z.mT, s), ("s.T @ e", got[1], z @ y.mT, s.mT)):
            slack = rounding * (turn.square() @ last.square()).sqrt()
            sums = gemm.slack(y, z.mT, dtype) + gemm.slack(turn, last, dtype)
            yield elementwise(out[number], first + turn @ last, slack + sums, name=f"program {number} {name}")


def _reductions(dtype: str) -> Iterable[Reading]:
    x = operands.normal(7, WIDTH, dtype=operands.DTYPES[dtype], seed=11, scale=4.0)
    x[1, 500] = x[1, 17] = x.max() + 1  # the first of equals is the place of the largest
    sums, largest = (torch.full((7,), float("nan"), device=x.device) for _ in range(2))
    places = torch.full((7,), -1, dtype=torch.int32, device=x.device)
    weights, running = (torch.full(x.shape, float("nan"), device=x.device) for _ in range(2))
    reductions[7,](x, sums, largest, places, weights, running, WIDTH, BLOCK=triton.next_power_of_2(WIDTH))
    (wide,) = float64(x)
    sizes = 2.0**-24 * wide.abs().cumsum(-1) * WIDTH**0.5
    p = wide.softmax(-1)
    yield elementwise(sums, wide.sum(-1), sizes[:, -1], name="sum")
    yield exact(largest, wide.amax(-1), name="largest")
    yield exact(places, wide.argmax(-1), name="place of the largest")
    yield elementwise(weights, p, (EXPONENTIAL * 32 + 2.0**-24 * WIDTH**0.5) * p, name="softmax")
    yield elementwise(running, wide.cumsum(-1), sizes, name="prefix sums")
