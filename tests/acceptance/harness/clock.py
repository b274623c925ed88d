"""How fast a device multiplies, by the clock of this process, which runs no code of the image.

In: a source of random numbers, and how a child is asked. Out: TFLOP/s, or what the answer contradicts. A
question is a chain of products X <- sign(X A). X and A follow from a seed; a salt that is drawn when the
clock starts changes X, so nothing can be computed before. No step can be left out, because sign is not
linear. No row can be left out: the child gives a sum of each row, and afterwards some rows are drawn and
computed here. So an answer that is right and early was computed, and one that is right and late was slow,
whatever the child says about its time.
"""

import contextlib
import hashlib
import multiprocessing
import random
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

Ask = Callable[..., Any]
Sums = Callable[[list[int], str, int], list[int]]  # of rows, by the salt and the steps
LEAST_S = 0.25  # of a question's work, so that a pipe and a scheduler are no part of it
LONGEST_S = 1.0  # of a question whose child says that it worked for less
TRIES = 4  # an honest child needs one that nothing disturbed; each is twice as long as the one before
SLACK = 2.0  # what a child's own seconds may be short of, for launches and a busy host
FEWEST_STEPS, MOST_STEPS = 20, 5000


@dataclass(frozen=True)
class Size:
    """Rows and width of X, how many rows are computed here, and by how many processes."""

    rows: int
    width: int
    checked: int
    workers: int = 1


# Half of the rows are right in all that are checked once in 2**checked; a row takes 7 ms for each step here.
GPU = Size(rows=65536, width=4096, checked=6, workers=6)
CPU = Size(rows=512, width=512, checked=16)


@dataclass(frozen=True)
class Clocked:
    """One question: its work, the seconds by this clock, those that the child says, and what is wrong."""

    flop: float
    seconds: float
    said_s: float
    problem: str = ""

    @property
    def tflops(self) -> float:
        """The rate in TFLOP/s by this clock."""
        return self.flop / self.seconds / 1e12


def clocked(source: random.Random, ask: Ask, size: Size) -> Clocked:
    """The first question whose answer nothing contradicts, or whose values are wrong; else the best."""
    seed = source.randbytes(16).hex()
    with _rows(seed, size) as sums_of:
        ask("workloads.chain:prepare", seed=seed, rows=size.rows, width=size.width)
        sums_of([], "", 0)  # the processes have the matrix before the clock starts
        return _clocked(source, ask, size, sums_of)


def _clocked(source: random.Random, ask: Ask, size: Size, sums_of: Sums) -> Clocked:
    steps, found = FEWEST_STEPS, list[Clocked]()
    while len(found) < TRIES:
        salt, asked = source.randbytes(16).hex(), steps + source.randrange(steps)
        begin = time.monotonic()
        answer = ask("workloads.chain:run", salt=salt, steps=asked)
        seconds = time.monotonic() - begin
        said = answer.get("seconds")
        said_s = said if isinstance(said, float) and said > 0 else 0.0
        if min(seconds, said_s) < LEAST_S and seconds < LONGEST_S and 2 * steps <= MOST_STEPS:
            steps *= 2
            continue
        sums = answer.get("sums")
        late = ""
        if isinstance(sums, list) and not said_s <= seconds <= SLACK * said_s:
            late = f"the child says that it took {said_s:.3g} s, and by the controller's clock it took"
            late = f"{late} {seconds:.3g} s"
        wrong = late or _wrong_value(source, sums, size, (salt, asked), sums_of)
        found.append(Clocked(2.0 * size.rows * size.width**2 * asked, seconds, said_s, wrong))
        if not late:
            return found[-1]
        steps = min(2 * steps, MOST_STEPS)  # what a busy host adds does not grow with the work
    return max(found, key=lambda one: one.said_s / one.seconds)


def _wrong_value(
    source: random.Random, sums: object, size: Size, asked: tuple[str, int], sums_of: Sums
) -> str:
    if not isinstance(sums, list) or len(sums) != size.rows:
        return "the answer has not one sum for each row"
    rows = [source.randrange(size.rows) for _ in range(size.checked)]
    for row, right in zip(rows, sums_of(rows, *asked), strict=True):
        if sums[row] != right:
            return f"row {row} sums up to {str(sums[row])[:40]}, and the controller computed {right}"
    return ""


@contextlib.contextmanager
def _rows(seed: str, size: Size) -> Iterator[Sums]:
    """What computes the sums of some rows, in several processes that start while the device prepares."""
    if size.workers == 1:
        matrix = _packed(seed, size.width)
        yield lambda rows, salt, steps: [row_sum(seed, salt, steps, row=row, matrix=matrix) for row in rows]
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(size.workers, context, _start, (seed, size.width)) as pool:
        ready = [pool.submit(_start, seed, size.width) for _ in range(size.workers)]

        def sums_of(rows: list[int], salt: str, steps: int) -> list[int]:
            for one in ready:
                one.result()
            return [one.result() for one in [pool.submit(_row, seed, salt, steps, row) for row in rows]]

        yield sums_of


_matrices: dict[str, list[int]] = {}  # of a process of `_rows`


def _start(seed: str, width: int) -> None:
    if seed not in _matrices:
        _matrices[seed] = _packed(seed, width)


def _row(seed: str, salt: str, steps: int, row: int) -> int:
    return row_sum(seed, salt, steps, row=row, matrix=_matrices[seed])


# -- the same numbers as workloads/chain.py, and one row in plain integers


def drawn(seed: str, what: str, size: int) -> bytes:
    """Bytes that follow from a seed, and are known to nobody before."""
    return hashlib.shake_128(f"{seed} {what}".encode()).digest(size)


def row_sum(seed: str, salt: str, steps: int, *, row: int, matrix: list[int]) -> int:
    """The weighted sum of one row of X after some steps."""
    width = len(matrix)
    signs = [1 if byte & 1 else -1 for byte in drawn(salt, "signs", width)]
    x = [(byte % 3 - 1) * sign for byte, sign in zip(drawn(seed, f"row {row}", width), signs, strict=True)]
    for _ in range(steps):
        x = _step(x, matrix)
    return sum(value * (number % 127 + 1) for number, value in enumerate(x))


def _step(x: list[int], matrix: list[int]) -> list[int]:
    """sign(x A). A row of A is one large integer: 16 bits for each number, 0, 1 or 2 for -1, 0 or 1."""
    plus = sum(line for value, line in zip(x, matrix, strict=True) if value > 0)
    minus = sum(line for value, line in zip(x, matrix, strict=True) if value < 0)
    bias = sum(x)
    return [(p - m > bias) - (p - m < bias) for p, m in zip(_fields(plus, x), _fields(minus, x), strict=True)]


def _fields(packed: int, like: list[int]) -> "array[int]":
    return array("H", packed.to_bytes(2 * len(like), "little"))


def _packed(seed: str, width: int) -> list[int]:
    table = bytes(byte % 3 for byte in range(256))
    body = drawn(seed, "matrix", width * width).translate(table)
    rows = (body[at : at + width] for at in range(0, width * width, width))
    return [int.from_bytes(array("H", list(row)).tobytes(), "little") for row in rows]
