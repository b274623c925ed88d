"""Bitwise equal results: over repeats, in a graph, on every device. In: repeats or seconds.
Out: cases or checksums.

Silent corruption rarely makes a NaN (about one outcome in a hundred, arXiv 2605.04213), so bits are compared,
on normal data, with the matrix units under full load.
"""

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F

from workloads import attention, cases, device, operands
from workloads.gates import Reading, bits, checksum, exact

SIZE = {"cuda": 4096, "cpu": 192}
BATCH = 20
HOT_SIZE = {"cuda": 8192, "cpu": 128}
GOLDEN_DEPTH = 2048
# The checksum of the product of integers by HOT_SIZE, from exact integer arithmetic on a CPU.
GOLDEN = {8192: 601_706_393_267_508_532, 128: -10_930_892_184}


def deterministic(dtype: str, repeats: int) -> dict[str, Any]:
    """Operations that are documented as deterministic repeat their bits where that is asked for.
    `default` is how many repeats have other bits where it is not, which no document excludes.
    """
    with promised():
        report = cases.run(_deterministic(dtype, repeats))
    product = _operations(dtype)["product"]
    first = [checksum(tensor) for tensor in product()]
    other = sum([checksum(tensor) for tensor in product()] != first for _ in range(repeats))
    return {**report, "default": other}


@contextlib.contextmanager
def promised() -> Iterator[None]:
    """Deterministic algorithms inside, where there are any; what has none warns and runs.

    By default ROCm's libraries may add up with atomics, in any order: PyTorch sets HIPBLAS_ATOMICS_ALLOWED
    (aten/src/ATen/cuda/CublasHandlePool.cpp) unless deterministicAlgorithms(), which warn_only leaves true
    (aten/src/ATen/Context.cpp). cuBLAS warns here: its promise for one stream needs no setting.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _deterministic(dtype: str, repeats: int) -> Iterator[cases.Case]:
    for name, function in _operations(dtype).items():
        yield f"{name} {repeats} times", functools.partial(_repeats, function, repeats)


def _operations(dtype: str) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    size, kind = SIZE[device().type], operands.DTYPES[dtype]
    a, b = (operands.normal(size, size, dtype=kind, seed=seed) for seed in (1, 2))
    q, k, v, _ = attention.inputs(attention.Shape(sq=size // 4, sk=size // 4, causal=True), dtype)
    weight = operands.normal(size, dtype=kind, seed=3)
    return {
        "product": lambda: (torch.mm(a, b),),
        "attention forward": lambda: (attention.attend(q, k, v, causal=True),),
        "rms_norm": lambda: (F.rms_norm(a, (size,), weight),),
        "softmax": lambda: (a.softmax(-1),),
        "sum": lambda: (a.sum(0), a.sum(1)),
    }


def _repeats(function: Callable[[], tuple[torch.Tensor, ...]], repeats: int) -> Iterable[Reading]:
    first = [checksum(tensor) for tensor in function()]
    other = [i for i in range(repeats) if [checksum(tensor) for tensor in function()] != first]
    yield Reading("repeats with other bits", float(len(other)), 0.0, f"repeats {other[:8]}")


def graph_replay(dtype: str) -> dict[str, Any]:
    """A captured forward and backward gives the bits of eager mode on new data."""
    with promised():
        return cases.run([(f"{dtype} replay equals eager", functools.partial(_replayed, dtype))])


def _replayed(dtype: str) -> Iterable[Reading]:
    kind = operands.DTYPES[dtype]
    x, w = (operands.normal(512, 512, dtype=kind, seed=seed) for seed in (4, 5))
    weight = torch.ones(512, dtype=kind, device=device())

    def step() -> tuple[torch.Tensor, ...]:
        leaf = x.detach().requires_grad_()
        out = F.silu(F.rms_norm(leaf, (512,), weight) @ w)
        return (out.detach(), *torch.autograd.grad(out, leaf, x))

    captured, replay = capture(step)
    for seed in (6, 7, 8):
        x.copy_(operands.normal(512, 512, dtype=kind, seed=seed))
        replay()
        for index, expected in enumerate(step()):
            yield exact(captured[index], expected, name=f"output {index}, data {seed}")


def capture(
    step: Callable[[], tuple[torch.Tensor, ...]],
) -> tuple[tuple[torch.Tensor, ...], Callable[[], None]]:
    """(outputs, replay).
    Without a GPU there are no graphs, so `replay` runs the step again into the outputs.
    """
    if device().type == "cpu":
        outputs = step()

        def again() -> None:
            for output, new in zip(outputs, step(), strict=True):
                output.copy_(new)

        return outputs, again
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    return outputs, graph.replay


def screen(seconds: float) -> dict[str, Any]:
    """Run products at full power for `seconds`, by algorithms that repeat their bits:
    the `checksum` of the first, and every repeat that differs.

    Two products alternate. One has normal data, which switches the most transistors: all devices of one model
    and stack must have the same checksum, which a check compares. The other has integers whose sums are exact
    in any order: its checksum `golden` must be `expected` on every device.
    """
    with promised():
        return _screen(seconds)


def _screen(seconds: float) -> dict[str, Any]:
    size = HOT_SIZE[device().type]
    a, b = (operands.normal(size, size, dtype=torch.bfloat16, seed=seed) for seed in (10, 11))
    shapes = ((size, GOLDEN_DEPTH), (GOLDEN_DEPTH, size))
    whole = [operands.hashed(*one, dtype=torch.bfloat16, salt=salt) for salt, one in enumerate(shapes, 1)]
    pairs = [(a, b), (whole[0], whole[1])]
    first = [torch.mm(*pair) for pair in pairs]
    other, repeats, end = [], 0, time.monotonic() + seconds
    while not repeats or time.monotonic() < end:
        for pair, golden in zip(pairs, first, strict=True):
            if text := _batch(pair, golden):
                other.append(f"up to repeat {repeats + BATCH}: {text}")
        repeats += BATCH
    found = {
        "checksum": checksum(first[0]),
        "inputs": checksum(a),
        "repeats": repeats,
        "differences": other[:8],
    }
    return {**found, "golden": checksum(first[1] + 0.0), "expected": GOLDEN[size]}


def _batch(pair: tuple[torch.Tensor, torch.Tensor], golden: torch.Tensor) -> str:
    """What differs in a batch, in words. The comparison runs on the device, to keep the matrix units busy."""
    out, differing = torch.empty_like(golden), torch.zeros((), dtype=torch.int64, device=golden.device)
    for _ in range(BATCH):
        torch.mm(*pair, out=out)
        differing += (bits(out) != bits(golden)).any()
    return f"{int(differing)} of {BATCH}; the last: {exact(out, golden)}" if int(differing) else ""
