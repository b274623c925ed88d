"""The speed of work that nobody named. In: a seed and a count. Out: what takes longer than larger work.

Work that holds other work takes no less time: 1,000 rows can be padded to 1,024, and a product in bfloat16
has the bytes of one in float16. So each drawn piece of work is timed beside larger ones, and is too slow if
it takes several times as long as one of them. That needs no figure of a device. Repeat a piece alone, in
tests/acceptance: `python3 -c "from workloads import generated_speed as g; print(g.repeat(0, 17))"`.
"""

import functools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from workloads import device, generated, operands, timing
from workloads.reference import precision

Call = Callable[[], object]
SLACK_S = 15e-6  # between two launches
PAIRS = 5  # times that a slow piece and the larger one are timed in turn, before it counts
CALLS = 10
# Operations and bytes of a drawn piece at most; the larger ones have a few times as many.
MOST = {"cuda": (2e11, 2**28), "cpu": (2e7, 2**20)}
# How many times as long as a larger work of its kind a piece may take: about twice the most of 57 on one
# H100 with torch 2.11 (docs/reference/trust.md).
MOST_TIMES: Mapping[str, Mapping[str, float]] = {
    "product": {"other half": 2, "float32": 2, "larger": 3, "padded": 3, "other layout": 3},
    "convolution": {"other half": 3, "float32": 3, "larger": 5, "padded": 5},
    "attention": {"other half": 4, "not grouped": 2.5, "not causal": 2, "padded": 4, "larger": 4},
    "rows": {"other half": 2, "float32": 2, "larger": 3, "padded": 3},
}
MOST_REFUSED = 0.1
HALVES = ("bf16", "fp16")
LAYOUTS = ("NN", "NT", "TN", "TT")


@dataclass(frozen=True)
class Work:
    """A piece of work: its kind, type, sizes by name, and the way in which it is done."""

    kind: str
    dtype: str
    sizes: tuple[tuple[str, int], ...]
    way: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = " ".join(f"{name}={size}" for name, size in self.sizes)
        return f"{self.kind} {' '.join(self.way)} {self.dtype} {sizes}"

    def of(self, name: str) -> int:
        """One of its sizes."""
        return dict(self.sizes)[name]

    def resized(self, **sizes: int) -> "Work":
        """The same work with other sizes."""
        return replace(self, sizes=tuple((name, sizes.get(name, size)) for name, size in self.sizes))


class Kind(NamedTuple):
    """How work of one kind is drawn, made and counted, and which larger work holds it."""

    draw: Callable[[random.Random], Work]
    make: Callable[[Work], Call]
    amount: Callable[[Work], tuple[float, float]]  # operations, bytes
    larger: Callable[[Work], Iterator[tuple[str, Work]]]


def _size(r: random.Random, low: float, high: float) -> int:
    """A size between two powers of two: even by 128 or by 8, or as it comes."""
    size = 2 ** r.uniform(low, high)
    step = r.choice((128, 64, 8, 1))
    return max(1, round(size / step)) * step if size > step else max(1, int(size))


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def _grown(work: Work, *names: str) -> Iterator[tuple[str, Work]]:
    """Each size larger by a quarter or more, with what divides it; and all of them as multiples of 128."""
    for name in names:
        step = math.gcd(work.of(name), 128)
        yield "larger", work.resized(**{name: _up(work.of(name) * 5 // 4 + 1, step)})
    padded = work.resized(**{name: _up(work.of(name), 128) for name in names})
    if padded != work:
        yield "padded", padded


def _other_type(work: Work) -> Iterator[tuple[str, Work]]:
    if work.dtype in HALVES:
        yield "other half", replace(work, dtype=HALVES[work.dtype == "bf16"])
        yield "float32", replace(work, dtype="fp32")


def _product(r: random.Random) -> Work:
    batch = r.choice((1, 1, _size(r, 1, 6)))
    sizes = (("batch", batch), *((name, _size(r, 4, 14)) for name in "mnk"))
    return Work("product", r.choice((*HALVES, "fp32")), sizes, (r.choice(LAYOUTS),))


def _make_product(work: Work) -> Call:
    batch, m, n, k = (size for _, size in work.sizes)
    kind = operands.DTYPES[work.dtype]
    shapes = ((m, k), (n, k) if work.way[0][1] == "T" else (k, n))
    a, b = (operands.normal(batch, *one, dtype=kind, seed=seed) for seed, one in enumerate(shapes, 1))
    if work.way[0][0] == "T":
        a = operands.normal(batch, k, m, dtype=kind, seed=1).mT
    b = b.mT if work.way[0][1] == "T" else b
    out = torch.empty(batch, m, n, dtype=kind, device=device())
    return (
        functools.partial(torch.bmm, a, b, out=out)
        if batch > 1
        else functools.partial(torch.mm, a[0], b[0], out=out[0])
    )


def _product_amount(work: Work) -> tuple[float, float]:
    batch, m, n, k = (size for _, size in work.sizes)
    return 2.0 * batch * m * n * k, 4.0 * batch * (m * k + n * k + m * n)


def _more_product(work: Work) -> Iterator[tuple[str, Work]]:
    yield from _other_type(work)
    yield from _grown(work, "m", "n", "k")
    for layout in LAYOUTS:
        if (layout,) != work.way:
            yield "other layout", replace(work, way=(layout,))


def _convolution(r: random.Random) -> Work:
    dims, grouped = r.choice((1, 2, 2, 2, 3)), r.random() < 0.2
    inner = _size(r, 1.6, 10)
    sizes = (
        ("dims", dims),
        ("batch", _size(r, 0, 6)),
        ("inner", inner),
        ("outer", inner if grouped else _size(r, 3, 10)),
        ("kernel", r.choice((1, 3, 3, 5, 7))),
        ("stride", r.choice((1, 1, 2))),
        ("size", _size(r, 3, {1: 13, 2: 8, 3: 6}[dims])),
    )
    layout = r.choice(("contiguous", "channels last")) if dims > 1 else "contiguous"
    way = (layout, r.choice(("forward", "backward")), *(["each channel alone"] if grouped else []))
    return Work("convolution", r.choice((*HALVES, "fp32")), sizes, way)


def _make_convolution(work: Work) -> Call:
    dims, batch, inner, outer, kernel, stride, size = (number for _, number in work.sizes)
    groups = inner if "each channel alone" in work.way else 1
    kind = operands.DTYPES[work.dtype]
    x = operands.normal(batch, inner, *[size] * dims, dtype=kind, seed=1)
    w = operands.normal(outer, inner // groups, *[kernel] * dims, dtype=kind, seed=2)
    if work.way[0] == "channels last":
        last = torch.channels_last if dims == 2 else torch.channels_last_3d
        x, w = x.to(memory_format=last), w.to(memory_format=last)
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    call = functools.partial(function, stride=stride, padding=kernel // 2, groups=groups)
    if work.way[1] == "forward":
        return functools.partial(call, x, w)
    return _backward(call, x, w)


def _backward(call: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Call:
    leaves = [one.detach().requires_grad_() for one in tensors]
    out = call(*leaves)
    g = operands.normal(*out.shape, dtype=out.dtype, seed=9).as_strided(out.shape, out.stride())
    return functools.partial(torch.autograd.grad, out, leaves, g, retain_graph=True)


def _convolution_amount(work: Work) -> tuple[float, float]:
    dims, batch, inner, outer, kernel, stride, size = (number for _, number in work.sizes)
    places = batch * float(-(-size // stride)) ** dims
    each = 1 if "each channel alone" in work.way else inner
    operations = 2.0 * places * outer * each * kernel**dims
    moved = 4.0 * (batch * inner * float(size) ** dims + places * outer)
    return (3 * operations, 2 * moved) if "backward" in work.way else (operations, moved)


def _more_convolution(work: Work) -> Iterator[tuple[str, Work]]:
    yield from _other_type(work)
    grouped = "each channel alone" in work.way
    for name in ("batch", "size", *(() if grouped else ("inner", "outer"))):
        step = math.gcd(work.of(name), 128)
        yield "larger", work.resized(**{name: _up(work.of(name) * 5 // 4 + 1, step)})
    padded = {name: _up(work.of(name), 64) for name in ("inner", "outer")}
    if work.resized(**padded) != work:
        yield "padded", work.resized(**padded)


def _attention(r: random.Random) -> Work:
    heads = r.choice((1, 2, 4))
    length = _size(r, 5, 13)
    sizes = (
        ("batch", _size(r, 0, 5)),
        ("heads", heads * r.choice((1, 2, 4, 8))),
        ("of", heads),
        ("queries", length),
        ("keys", r.choice((length, length, _size(r, 5, 13)))),
        ("head", r.choice((32, 40, 64, 72, 80, 96, 104, 128, 128, 160, 192, 256))),
    )
    way = (r.choice(("causal", "full")), r.choice(("forward", "backward")))
    return Work("attention", r.choice(HALVES), sizes, way)


def _make_attention(work: Work) -> Call:
    batch, heads, of, queries, keys, head = (size for _, size in work.sizes)
    kind = operands.DTYPES[work.dtype]
    shapes = ((heads, queries), (of, keys), (of, keys))
    q, k, v = (operands.normal(batch, *one, head, dtype=kind, seed=n) for n, one in enumerate(shapes))
    call = functools.partial(
        F.scaled_dot_product_attention, is_causal=work.way[0] == "causal", enable_gqa=heads != of
    )
    return functools.partial(call, q, k, v) if work.way[1] == "forward" else _backward(call, q, k, v)


def _attention_amount(work: Work) -> tuple[float, float]:
    batch, heads, _, queries, keys, head = (float(size) for _, size in work.sizes)
    operations = 4 * batch * heads * queries * keys * head
    moved = 8 * batch * heads * (queries + keys) * head
    return (3 * operations, 2 * moved) if "backward" in work.way else (operations, moved)


def _more_attention(work: Work) -> Iterator[tuple[str, Work]]:
    yield "other half", replace(work, dtype=HALVES[work.dtype == "bf16"])
    if work.of("of") != work.of("heads"):
        yield "not grouped", work.resized(of=work.of("heads"))
    if work.way[0] == "causal":
        yield "not causal", replace(work, way=("full", work.way[1]))
    padded = {"queries": _up(work.of("queries"), 128), "keys": _up(work.of("keys"), 128)}
    padded["head"] = next(size for size in (64, 128, 256) if size >= work.of("head"))
    if work.resized(**padded) != work:
        yield "padded", work.resized(**padded)
    for name in ("batch", "keys"):
        yield "larger", work.resized(**{name: work.of(name) * 5 // 4 + 1})


def _moved(x: torch.Tensor) -> torch.Tensor:
    return x.t().contiguous()


def _chosen(x: torch.Tensor) -> torch.Tensor:
    places = torch.arange(x.shape[0], device=x.device) * 7919 % x.shape[0]
    return x.index_select(0, places)


def _loss(x: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x, torch.arange(x.shape[0], device=x.device) * 31 % x.shape[1])


def _normed(norm: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return norm(x, (x.shape[1],), torch.ones(x.shape[1], dtype=x.dtype, device=x.device))


ROWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": functools.partial(F.softmax, dim=-1),
    "log_softmax": functools.partial(F.log_softmax, dim=-1),
    "layer_norm": functools.partial(_normed, F.layer_norm),
    "rms_norm": functools.partial(_normed, F.rms_norm),
    "cross_entropy": _loss,
    "gelu": F.gelu,
    "silu": F.silu,
    "dropout": functools.partial(F.dropout, p=0.1),
    "sum of rows": functools.partial(torch.sum, dim=-1),
    "sum of columns": functools.partial(torch.sum, dim=0),
    "largest": functools.partial(torch.amax, dim=-1),
    "spread": functools.partial(torch.std, dim=-1),
    "running sum": functools.partial(torch.cumsum, dim=-1),
    "transposed copy": _moved,
    "chosen rows": _chosen,
    "joined": lambda x: torch.cat((x, x), dim=-1),
}


def _rows(r: random.Random) -> Work:
    sizes = (("rows", _size(r, 0, 20)), ("width", _size(r, 3, 17)))
    name = r.choice(list(ROWS))
    # torch adds numbers of 16 bits one by one where the width is odd: 7 times as long (H100, torch 2.11).
    way = (name, "forward" if name == "chosen rows" else r.choice(("forward", "backward")))
    return Work("rows", r.choice(HALVES), sizes, way)


def _make_rows(work: Work) -> Call:
    x = operands.normal(work.of("rows"), work.of("width"), dtype=operands.DTYPES[work.dtype], seed=1)
    call = ROWS[work.way[0]]
    return functools.partial(call, x) if work.way[1] == "forward" else _backward(call, x)


def _rows_amount(work: Work) -> tuple[float, float]:
    return 0.0, 8.0 * work.of("rows") * work.of("width")


def _more_rows(work: Work) -> Iterator[tuple[str, Work]]:
    yield from _other_type(work)
    yield from _grown(work, "rows", "width")


KINDS: Mapping[str, Kind] = {
    "product": Kind(_product, _make_product, _product_amount, _more_product),
    "convolution": Kind(_convolution, _make_convolution, _convolution_amount, _more_convolution),
    "attention": Kind(_attention, _make_attention, _attention_amount, _more_attention),
    "rows": Kind(_rows, _make_rows, _rows_amount, _more_rows),
}


def draw(seed: int, number: int) -> Work:
    """A piece of work that fits; the kinds take turns."""
    kind = KINDS[list(KINDS)[number % len(KINDS)]]
    r = random.Random(f"speed {seed} {number}")
    while True:
        work = kind.draw(r)
        if all(one <= most for one, most in zip(kind.amount(work), MOST[device().type], strict=True)):
            return work


def seconds(work: Work) -> float:
    """The median time of cold calls."""
    gradients = torch.enable_grad() if "backward" in work.way else torch.no_grad()
    with precision(work.dtype), torch.backends.cudnn.flags(enabled=True, allow_tf32=False), gradients:
        return timing.repeats(KINDS[work.kind].make(work), count=1, calls=CALLS, rest_s=0.0)[0]


def share(mine: float, its: float) -> float:
    """How many times as long the work takes as a larger one, without what a launch may differ by."""
    return max(0.0, mine - SLACK_S) / its


def beside(work: Work) -> list[tuple[str, Work, float]]:
    """Each larger work: why it holds this one, and how many times as long as it this one takes."""
    mine = seconds(work)
    return [(why, other, share(mine, seconds(other))) for why, other in KINDS[work.kind].larger(work)]


def is_slow(work: Work, why: str, other: Work) -> str | None:
    """What is said of slow work that stays slow when both are timed again, in turn; None of other work."""
    pairs = [(seconds(work), seconds(other)) for _ in range(PAIRS)]
    times, most = statistics.median(share(*pair) for pair in pairs), MOST_TIMES[work.kind][why]
    if times <= most:
        return None
    mine, its = (statistics.median(one) * 1e6 for one in zip(*pairs, strict=True))
    return (
        f"{work}: {mine:.0f} us, {times:.2f} times the {its:.0f} us of {other} ({why}), allowed are {most:g}"
    )


def repeat(seed: int, number: int) -> list[str]:
    """What is said of one drawn piece of work."""
    work = draw(seed, number)
    slow = [(why, other) for why, other, times in beside(work) if times > MOST_TIMES[work.kind][why]]
    return [words for why, other in slow if (words := is_slow(work, why, other))]


def check(seed: int, least: int = 40, most: int = 240, budget_s: float = 60.0) -> dict[str, Any]:
    """Draw pieces of work: at least `least`, then more until the time is over, `most` at most.

    Returns their number, how many the stack refuses, the worst share by kind and reason, and the slow ones.
    """
    end, number, refused, slow = time.monotonic() + budget_s, 0, 0, []
    worst: dict[tuple[str, str], float] = {}
    while number < least or (number < most and time.monotonic() < end):
        work = draw(seed, number)
        number += 1
        try:
            for why, other, times in beside(work):
                said = is_slow(work, why, other) if times > MOST_TIMES[work.kind][why] else None
                slow += [f"[{seed}, {number - 1}] {said}"] if said else []
                held = min(times, MOST_TIMES[work.kind][why]) if said is None else times
                worst[work.kind, why] = max(worst.get((work.kind, why), 0.0), held)
        except RuntimeError as error:
            if any(word in str(error).lower() for word in generated.BROKEN):
                raise
            refused += 1  # loud
    figures = [{"kind": kind, "beside": why, "times": times} for (kind, why), times in sorted(worst.items())]
    return {"pieces": number, "refused": refused, "figures": figures, "slow": slow}
