"""Many replays of a captured block in this process, each compared with eager mode. In: a dtype, a number.

Out: the report of `cases.run`. A check runs it in several new processes, because a wrong replay was seen in
one of five processes only (ROCm/clr#279), and there at some replays.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F

from workloads import cases, device, operands, repeatability
from workloads.gates import Reading, bits, exact

# cuBLAS repeats its bits only with a workspace of its own; it reads this when the process begins.
ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
TOKENS, HEADS, HEAD, HIDDEN = 256, 8, 64, 1024
WIDTH = HEADS * HEAD
DATA = 8
Refresh = Literal["device", "host"]
Outputs = tuple[torch.Tensor, ...]


def check(dtype: str, replays: int) -> dict[str, Any]:
    """The inputs of each replay come from the device, then from the host."""
    with _deterministic():
        return cases.run(_cases(operands.DTYPES[dtype], replays))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    """Deterministic algorithms inside: without them ROCm's products may differ between calls."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def _cases(dtype: torch.dtype, replays: int) -> Iterator[cases.Case]:
    sources: tuple[Refresh, ...] = ("device", "host")
    for source in sources:
        words = f"{replays} replays with inputs from the {source}"
        yield words, functools.partial(_replayed, dtype, replays, source)


def _block(dtype: torch.dtype) -> tuple[torch.Tensor, Callable[[], Outputs]]:
    """The input, and a step on it: attention, then the forward and backward of a gated MLP."""
    x = operands.normal(TOKENS, WIDTH, dtype=dtype, seed=1)
    shapes = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 2 * HIDDEN), (HIDDEN, WIDTH))
    into, back, up, down = (
        operands.normal(*shape, dtype=dtype, seed=seed, scale=shape[0] ** -0.5)
        for seed, shape in enumerate(shapes, 2)
    )
    gain = torch.ones(WIDTH, dtype=dtype, device=device())

    def step() -> Outputs:
        q, k, v = (
            (F.rms_norm(x, (WIDTH,), gain) @ into).view(1, TOKENS, 3, HEADS, HEAD).permute(2, 0, 3, 1, 4)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        middle = x + mixed.transpose(1, 2).reshape(TOKENS, WIDTH) @ back
        leaf = middle.detach().requires_grad_()
        gate, value = (F.rms_norm(leaf, (WIDTH,), gain) @ up).chunk(2, -1)
        out = leaf + (F.silu(gate) * value) @ down
        (grad,) = torch.autograd.grad(out, leaf, middle)
        return middle, out.detach(), grad, out.detach().float().softmax(-1)

    return x, step


def _replayed(dtype: torch.dtype, replays: int, source: Refresh) -> Iterable[Reading]:
    x, step = _block(dtype)
    data = [operands.normal(TOKENS, WIDTH, dtype=dtype, seed=100 + number) for number in range(DATA)]
    expected = [_eager(x, step, one) for one in data]
    for index, again in enumerate(_eager(x, step, data[0])):
        yield exact(again, expected[0][index], name=f"eager mode repeats output {index}")
    captured, replay = repeatability.capture(step)
    refresh = _from_host(x, data) if source == "host" else lambda number: x.copy_(data[number])
    wrong = torch.zeros(replays, dtype=torch.int64, device=device())
    for number in range(replays):
        refresh(number % DATA)
        replay()
        for got, want in zip(captured, expected[number % DATA], strict=True):
            wrong[number] += (bits(got) != bits(want)).sum()  # stays on the device: replays follow each other
    bad = wrong.nonzero().flatten().tolist()
    yield Reading("wrong replays", float(len(bad)), 0.0, f"the first: {bad[:8]}" if bad else "")


def _eager(x: torch.Tensor, step: Callable[[], Outputs], data: torch.Tensor) -> Outputs:
    x.copy_(data)
    return tuple(output.clone() for output in step())


def _from_host(x: torch.Tensor, data: list[torch.Tensor]) -> Callable[[int], object]:
    """Copies from the host's memory, which is pinned and written anew for two thirds of the inputs."""
    gpu = x.device.type == "cuda"
    pinned = [one.cpu().pin_memory() if gpu else one.cpu() for one in data]
    one = torch.empty_like(pinned[0], pin_memory=gpu)

    def refresh(number: int) -> object:
        if number % 3 == 0:
            return x.copy_(pinned[number], non_blocking=True)
        if gpu:
            torch.cuda.synchronize()  # the last copy from this buffer may still run
        one.copy_(pinned[number])
        return x.copy_(one, non_blocking=True)

    return refresh
