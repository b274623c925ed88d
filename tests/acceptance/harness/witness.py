"""Questions that a child cannot know before, and answers that the controller computes itself.

In: a source of random numbers. Out: the numbers of a question, the values that are right, and what is wrong
with an answer. All references are float64 in plain Python, in the controller: nothing of the image takes
part.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = list[float]
Matrix = list[Row]
Values = Mapping[str, Any]

TOLERANCE = 2e-4  # of the largest value; float32 stays below 2e-6 here, and TF32 below 5e-3 is not asked for
GRID = 64  # numbers are multiples of 1/64, which every type from bf16 on holds exactly


@dataclass(frozen=True)
class Question:
    """A family of computations: how its numbers are drawn, and what is right."""

    draw: Callable[[random.Random], dict[str, Any]]
    answer: Callable[..., Values]


def worst(right: Values, answer: object) -> float:
    """How far an answer is from what is right, in tolerances; infinite if it has another form."""
    if not isinstance(answer, Mapping) or answer.keys() != right.keys():
        return math.inf
    return max(_distance(right[name], answer[name]) for name in right)


def _distance(right: Any, given: object) -> float:
    wanted, found = list(_flat(right)), list(_flat(given))
    if _form(right) != _form(given) or not all(math.isfinite(value) for value in found):
        return math.inf
    scale = TOLERANCE * (1e-3 + max(map(abs, wanted), default=0.0))
    return max((abs(a - b) / scale for a, b in zip(wanted, found, strict=True)), default=math.inf)


def _flat(values: object) -> Iterator[float]:
    if isinstance(values, list):
        for value in values:
            yield from _flat(value)
    elif isinstance(values, int | float) and not isinstance(values, bool):
        yield float(values)
    else:
        yield math.nan


def _form(values: object) -> Any:
    return [_form(value) for value in values] if isinstance(values, list) else None


# -- plain arithmetic


def numbers(source: random.Random, *shape: int, reach: int = GRID) -> Any:
    """Multiples of 1/64 between -1 and 1 as nested lists, never 0: what is lost must be seen."""
    if not shape:
        return source.choice((-1, 1)) * source.randint(1, reach) / GRID
    return [numbers(source, *shape[1:], reach=reach) for _ in range(shape[0])]


def product(a: Matrix, b: Matrix) -> Matrix:
    """The matrix product."""
    columns = turned(b)
    return [[math.fsum(map(_times, row, column)) for column in columns] for row in a]


def turned(a: Matrix) -> Matrix:
    """The transpose."""
    return [list(column) for column in zip(*a, strict=True)]


def _times(x: float, y: float) -> float:
    return x * y


def softmax(row: Row) -> Row:
    """The shares of a row."""
    high = max(row)
    powers = [math.exp(value - high) for value in row]
    return [power / math.fsum(powers) for power in powers]


# -- the families


def _draw_gemm(source: random.Random) -> dict[str, Any]:
    m, n, k = (source.randint(25, 44) for _ in range(3))
    return {"a": numbers(source, m, k), "b": numbers(source, k, n), "weights": numbers(source, m, n)}


def _gemm(a: Matrix, b: Matrix, weights: Matrix) -> Values:
    return {"product": product(a, b), "a": product(weights, turned(b)), "b": product(turned(a), weights)}


def _draw_attention(source: random.Random) -> dict[str, Any]:
    heads, length, width = source.randint(1, 3), source.randint(9, 24), 8 * source.randint(1, 3)
    parts = {name: numbers(source, heads, length, width) for name in ("q", "k", "v", "weights")}
    return {**parts, "causal": source.random() < 0.5}


def _attention(q: Any, k: Any, v: Any, weights: Any, *, causal: bool) -> Values:
    heads = [_head(*parts, causal=causal) for parts in zip(q, k, v, weights, strict=True)]
    return {name: [head[name] for head in heads] for name in ("out", "q", "k", "v")}


def _head(q: Matrix, k: Matrix, v: Matrix, weights: Matrix, *, causal: bool) -> dict[str, Matrix]:
    scale = 1 / math.sqrt(len(q[0]))
    scores = [[value * scale for value in row] for row in product(q, turned(k))]
    shares = [
        softmax(row[: number + 1]) + [0.0] * (len(row) - number - 1) if causal else softmax(row)
        for number, row in enumerate(scores)
    ]
    slopes = []
    for share, slope in zip(shares, product(weights, turned(v)), strict=True):
        mean = math.fsum(map(_times, share, slope))
        slopes.append([p * (s - mean) * scale for p, s in zip(share, slope, strict=True)])
    return {
        "out": product(shares, v),
        "q": product(slopes, k),
        "k": product(turned(slopes), q),
        "v": product(turned(shares), weights),
    }


def _draw_layer_norm(source: random.Random) -> dict[str, Any]:
    rows, width = source.randint(3, 12), source.randint(17, 90)
    return {
        "x": numbers(source, rows, width, reach=4 * GRID),
        "scale": numbers(source, width),
        "shift": numbers(source, width),
        "weights": numbers(source, rows, width),
        "eps": source.choice((1e-5, 1e-3)),
    }


def _layer_norm(x: Matrix, scale: Row, shift: Row, weights: Matrix, eps: float) -> Values:
    found: dict[str, Matrix] = {"out": [], "x": [], "hat": []}
    for row, weight in zip(x, weights, strict=True):
        size = len(row)
        mean = math.fsum(row) / size
        factor = 1 / math.sqrt(math.fsum((value - mean) ** 2 for value in row) / size + eps)
        hat = [(value - mean) * factor for value in row]
        slope = list(map(_times, weight, scale))
        level, along = math.fsum(slope) / size, math.fsum(map(_times, slope, hat)) / size
        found["out"].append([h * g + b for h, g, b in zip(hat, scale, shift, strict=True)])
        found["x"].append([factor * (s - level - h * along) for s, h in zip(slope, hat, strict=True)])
        found["hat"].append(hat)
    pairs = list(zip(turned(weights), turned(found.pop("hat")), strict=True))
    gain = [math.fsum(map(_times, weight, hat)) for weight, hat in pairs]
    return {**found, "scale": gain, "shift": [math.fsum(weight) for weight, _ in pairs]}


def _draw_cross_entropy(source: random.Random) -> dict[str, Any]:
    rows, classes = source.randint(3, 17), source.randint(11, 200)
    targets = [source.randrange(classes) for _ in range(rows)]
    return {"logits": numbers(source, rows, classes, reach=6 * GRID), "targets": targets}


def _cross_entropy(logits: Matrix, targets: list[int]) -> Values:
    shares = [softmax(row) for row in logits]
    losses = [-math.log(share[target]) for share, target in zip(shares, targets, strict=True)]
    slopes = [
        [(share - (number == target)) / len(targets) for number, share in enumerate(row)]
        for row, target in zip(shares, targets, strict=True)
    ]
    return {"loss": [math.fsum(losses) / len(losses)], "logits": slopes}


def _draw_convolution(source: random.Random) -> dict[str, Any]:
    channels, filters, side, reach = (source.randint(*ends) for ends in ((1, 4), (1, 5), (7, 12), (1, 3)))
    stride, padding = source.randint(1, 2), source.randint(0, 1)
    out = (side + 2 * padding - reach) // stride + 1
    return {
        "x": numbers(source, channels, side, side),
        "kernel": numbers(source, filters, channels, reach, reach),
        "weights": numbers(source, filters, out, out),
        "stride": stride,
        "padding": padding,
    }


def _convolution(x: Any, kernel: Any, weights: Any, stride: int, padding: int) -> Values:
    side, out = len(x[0]), len(weights[0])
    found = {"out": _zeros(weights), "x": _zeros(x), "kernel": _zeros(kernel)}
    for f, filters in enumerate(kernel):
        for c, window in enumerate(filters):
            taps = [(i, j) for i in range(len(window)) for j in range(len(window))]
            places = [(u, w) for u in range(out) for w in range(out)]
            for (i, j), (u, w) in ((tap, place) for tap in taps for place in places):
                row, column = u * stride + i - padding, w * stride + j - padding
                if 0 <= row < side and 0 <= column < side:
                    found["out"][f][u][w] += x[c][row][column] * window[i][j]
                    found["x"][c][row][column] += weights[f][u][w] * window[i][j]
                    found["kernel"][f][c][i][j] += weights[f][u][w] * x[c][row][column]
    return found


def _zeros(like: Any) -> Any:
    return [_zeros(part) for part in like] if isinstance(like, list) else 0.0


def _draw_embedding(source: random.Random) -> dict[str, Any]:
    entries, width, rows = source.randint(5, 60), source.randint(3, 33), source.randint(4, 45)
    chosen = [source.randrange(entries) for _ in range(rows)]
    chosen += source.choices(chosen, k=rows)  # the gradients of a repeated row are added
    return {
        "table": numbers(source, entries, width),
        "rows": chosen,
        "weights": numbers(source, 2 * rows, width),
    }


def _embedding(table: Matrix, rows: list[int], weights: Matrix) -> Values:
    slopes = _zeros(table)
    for row, weight in zip(rows, weights, strict=True):
        slopes[row] = [a + b for a, b in zip(slopes[row], weight, strict=True)]
    return {"out": [table[row] for row in rows], "table": slopes}


def _draw_optimizer(source: random.Random) -> dict[str, Any]:
    size, steps = source.randint(9, 60), source.randint(3, 9)
    return {
        "start": numbers(source, size),
        "gradients": numbers(source, steps, size),
        "lr": source.choice((1e-2, 3e-2, 1e-1)),
        "betas": (source.choice((0.8, 0.9)), source.choice((0.95, 0.99))),
        "eps": 1e-4,
        "decay": source.choice((0.0, 0.1, 0.3)),
    }


def _optimizer(
    start: Row, gradients: Matrix, *, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> Values:
    found, means, squares = list(start), [0.0] * len(start), [0.0] * len(start)
    for step, gradient in enumerate(gradients, 1):
        means = [betas[0] * m + (1 - betas[0]) * g for m, g in zip(means, gradient, strict=True)]
        squares = [betas[1] * s + (1 - betas[1]) * g * g for s, g in zip(squares, gradient, strict=True)]
        first, second = 1 - betas[0] ** step, 1 - betas[1] ** step
        found = [
            p * (1 - lr * decay) - lr * (m / first) / (math.sqrt(s / second) + eps)
            for p, m, s in zip(found, means, squares, strict=True)
        ]
    # A wrong moment changes the parameter by less than its tolerance, and the way that it went by more.
    return {"parameter": found, "moved": [after - before for after, before in zip(found, start, strict=True)]}


def _draw_training(source: random.Random) -> dict[str, Any]:
    rows, width, hidden, classes = (source.randint(*ends) for ends in ((6, 14), (5, 12), (7, 16), (3, 9)))
    return {
        "x": numbers(source, rows, width),
        "targets": [source.randrange(classes) for _ in range(rows)],
        "first": numbers(source, width, hidden),
        "second": numbers(source, hidden, classes),
        "lr": source.choice((0.1, 0.3, 0.5)),
        "steps": source.randint(3, 8),
    }


def _training(
    x: Matrix, targets: list[int], first: Matrix, second: Matrix, *, lr: float, steps: int
) -> Values:
    losses = []
    for _ in range(steps):
        hidden = [[math.tanh(value) for value in row] for row in product(x, first)]
        told = _cross_entropy(product(hidden, second), targets)
        losses += told["loss"]
        back = [
            [slope * (1 - h * h) for slope, h in zip(row, heights, strict=True)]
            for row, heights in zip(product(told["logits"], turned(second)), hidden, strict=True)
        ]
        second = _moved(second, product(turned(hidden), told["logits"]), lr)
        first = _moved(first, product(turned(x), back), lr)
    return {"losses": losses, "first": first, "second": second}


def _moved(weights: Matrix, slopes: Matrix, lr: float) -> Matrix:
    return [
        [w - lr * s for w, s in zip(row, slope, strict=True)]
        for row, slope in zip(weights, slopes, strict=True)
    ]


def draw_collectives(source: random.Random, ranks: int) -> dict[str, Any]:
    """Numbers for each rank, and the rank that sends its own to all."""
    width = source.randint(5, 99)
    return {"numbers": numbers(source, ranks, width), "root": source.randrange(ranks)}


def collectives(numbers: Sequence[Row], root: int) -> Values:
    """What every rank has after the sum, the maximum, the broadcast and the gathering."""
    columns = list(zip(*numbers, strict=True))
    return {
        "total": [math.fsum(column) for column in columns],
        "highest": [max(column) for column in columns],
        "root": numbers[root],
        "parts": list(numbers),
    }


FAMILIES = {
    "gemm": Question(_draw_gemm, _gemm),
    "attention": Question(_draw_attention, _attention),
    "layer_norm": Question(_draw_layer_norm, _layer_norm),
    "cross_entropy": Question(_draw_cross_entropy, _cross_entropy),
    "convolution": Question(_draw_convolution, _convolution),
    "embedding": Question(_draw_embedding, _embedding),
    "optimizer": Question(_draw_optimizer, _optimizer),
    "training": Question(_draw_training, _training),
}
