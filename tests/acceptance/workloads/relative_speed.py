"""The speed of kernels beside another one of the same run. In: nothing, or a dtype. Out: figures.

A share of what this device has just reached needs no bound of a device model: gradients' products beside the
product that has one, kernels that only move data beside a copy, captured kernels beside launched ones. A
figure is `{"kernel", "beside", "repeats": [shares], "value", "least"}`, without a unit. The least shares are
about four fifths of what one healthy H200 read with torch 2.11 (docs/results/suites-h200.md).
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from workloads import device, operands, repeatability, synchronize, timing
from workloads.reference import precision

COUNT = 3  # repeats of each figure
Call = Callable[[], object]
# Products of a linear layer's backward, by layout: NN for the gradient of its input, TN for that of its
# weight. m, n, k of an 8B Llama's hidden layer and attention at 8192 tokens.
GRADIENTS: dict[str, dict[str, tuple[tuple[int, int, int], ...]]] = {
    "bf16": {
        "NN": ((8192, 4096, 28672), (8192, 4096, 4096)),
        "TN": ((28672, 4096, 8192), (4096, 4096, 8192)),
    },
    "fp32": {"NN": ((4096, 4096, 4096),), "TN": ((4096, 4096, 4096),)},
}
SMALL = (128, 128, 128)  # of a CPU
LEAST_OF_NT = 0.9
# float32 reaches a share of its peak, bf16 of its own: the first is at least this part of the second.
LEAST_OF_PEAKS = 0.75
LOWEST_FLOAT32 = 1 / 28  # of bf16's peak, where a row has none of float32: B200's, the smallest that is known
# Rows, width and vocabulary of Llama 3; elements of an optimizer's weights. Far beyond any cache.
SIZES = {"cuda": (65_536, 4096, 128_256, 1 << 26), "cpu": (64, 256, 1024, 1 << 12)}
LOGITS_ROWS = {"cuda": 2048, "cpu": 16}
LAUNCHES = 400
LEAST_OF_EAGER = 2.0


def rates(name: str, call: Call, amount: float, **how: Any) -> list[float]:
    """`amount` a second of each repeat. `name`: of the kernel, by which a test plants a slow one."""
    del name
    return [amount / seconds for seconds in timing.repeats(call, count=COUNT, **how)]


def beside(kernel: str, found: list[float], other: str, rate: float, least: float) -> dict[str, Any]:
    """A figure: the share of the other's rate in each repeat, and the least share."""
    shares = [one / rate for one in found]
    value = statistics.median(shares)
    return {"kernel": kernel, "beside": other, "repeats": shares, "value": value, "least": least}


def products(dtype: str) -> list[dict[str, Any]]:
    """Products in the layouts of gradients, beside the same sizes in the layout of forward (NT)."""
    with precision(dtype):
        return list(_products(dtype))


def _products(dtype: str) -> Iterator[dict[str, Any]]:
    usual: dict[tuple[int, ...], float] = {}
    for layout, shapes in GRADIENTS[dtype].items():
        for shape in shapes if device().type == "cuda" else (SMALL,):
            if shape not in usual:
                usual[shape] = statistics.median(_product("NT", dtype, shape))
            name = f"{dtype} {layout} {'x'.join(map(str, shape))}"
            yield beside(name, _product(layout, dtype, shape), "NT", usual[shape], LEAST_OF_NT)


def _product(layout: str, dtype: str, shape: tuple[int, ...]) -> list[float]:
    """Operations a second. N: in rows as the product reads it; T: transposed, so a view of the other."""
    m, n, k = shape
    kind = operands.DTYPES[dtype]
    a = operands.normal(*((m, k) if layout[0] == "N" else (k, m)), dtype=kind, seed=1)
    b = operands.normal(*((k, n) if layout[1] == "N" else (n, k)), dtype=kind, seed=2)
    left, right = a if layout[0] == "N" else a.t(), b if layout[1] == "N" else b.t()
    out = torch.empty(m, n, dtype=kind, device=device())
    call = functools.partial(torch.mm, left, right, out=out)
    return rates(f"{dtype} {layout}", call, 2.0 * m * n * k)


def float32_beside_bf16(peaks: dict[str, float]) -> list[dict[str, Any]]:
    """IEEE float32's share of its peak beside bf16's share of its own, in one product. `peaks`: TFLOP/s."""
    shape = GRADIENTS["fp32"]["NN"][0] if device().type == "cuda" else SMALL
    found = {}
    for dtype in ("bf16", "fp32"):
        with precision(dtype):
            found[dtype] = _product("NT", dtype, shape)
    known = "bf16" in peaks and "fp32" in peaks
    ratio = peaks["fp32"] / peaks["bf16"] if known else LOWEST_FLOAT32
    usual = ratio * statistics.median(found["bf16"])
    return [beside("fp32 NT", found["fp32"], "bf16 by their peaks", usual, LEAST_OF_PEAKS)]


def memory_bound() -> list[dict[str, Any]]:
    """Kernels that mostly move data, beside a copy inside the device's memory."""
    source = _activations(3)
    copied = rates("copy", functools.partial(torch.empty_like(source).copy_, source), 2.0 * source.nbytes)
    rate = statistics.median(copied)
    found = []
    for name, (make, least) in KERNELS.items():
        if name.startswith("rms_norm") and not hasattr(torch.ops.aten, "_fused_rms_norm"):
            continue  # before torch 2.9 it is several kernels
        call, moved = make()
        found.append(beside(name, rates(name, call, float(moved), rest_s=0.0), "copy", rate, least))
        del call
    return found


def _activations(seed: int) -> torch.Tensor:
    rows, width, _, _ = SIZES[device().type]
    return operands.normal(rows, width, dtype=torch.bfloat16, seed=seed)


def _backward(out: torch.Tensor, leaves: list[torch.Tensor]) -> Call:
    gradient = torch.randn_like(out)
    return functools.partial(torch.autograd.grad, out, leaves, gradient, retain_graph=True)


def _norm(kind: str, *, backward: bool = False) -> tuple[Call, int]:
    """Read and write once.
    Backward, input and gradient are read for dx, which is written, and read again for the weight's gradient.
    """
    x = _activations(4).requires_grad_(backward)
    weight = torch.ones(x.shape[1], dtype=x.dtype, device=x.device, requires_grad=backward)
    call = functools.partial(getattr(functional, kind), x, (x.shape[1],), weight)
    return (_backward(call(), [x, weight]), 5 * x.nbytes) if backward else (call, 2 * x.nbytes)


def _softmax() -> tuple[Call, int]:
    """Read and write once."""
    x = _activations(5)
    return functools.partial(x.softmax, -1), 2 * x.nbytes


def _cross_entropy(*, backward: bool = False) -> tuple[Call, int]:
    """Logits are read, and their log-softmax is written.
    Backward, the loss's gradient is written, read with the log-softmax, and the logits' gradient is written.
    """
    where = device()
    rows, words = LOGITS_ROWS[where.type], SIZES[where.type][2]
    logits = operands.normal(rows, words, dtype=torch.bfloat16, seed=6).requires_grad_(backward)
    call = functools.partial(functional.cross_entropy, logits, torch.arange(rows, device=where) * 31 % words)
    return (_backward(call(), [logits]), 4 * logits.nbytes) if backward else (call, 2 * logits.nbytes)


def _adamw() -> tuple[Call, int]:
    """Weight, gradient and both moments are read; all but the gradient are written."""
    count = SIZES[device().type][3]
    weight = torch.nn.Parameter(operands.normal(count, dtype=torch.float32, seed=7))
    weight.grad = operands.normal(count, dtype=torch.float32, seed=8)
    return torch.optim.AdamW([weight], fused=True).step, 7 * weight.nbytes


def _embedding(*, backward: bool = False) -> tuple[Call, int]:
    """The rows of one word for each row of activations are read and written.
    Backward, the table's gradient is cleared; each word's is read and added.
    """
    rows, width, words, _ = SIZES[device().type]
    table = operands.normal(words, width, dtype=torch.bfloat16, seed=9).requires_grad_(backward)
    chosen = torch.randint(words, (rows,), generator=operands.generator(10), device=device())
    call = functools.partial(functional.embedding, chosen, table)
    if not backward:
        return call, 2 * rows * table[0].nbytes
    out = call()
    return _backward(out, [table]), table.nbytes + 2 * out.nbytes


# name: (what makes it and says how many bytes torch's own kernels move, the least share of the copy's speed)
KERNELS: dict[str, tuple[Callable[[], tuple[Call, int]], float]] = {
    "layer_norm": (functools.partial(_norm, "layer_norm"), 0.55),
    "layer_norm backward": (functools.partial(_norm, "layer_norm", backward=True), 0.55),
    "rms_norm": (functools.partial(_norm, "rms_norm"), 0.65),
    "rms_norm backward": (functools.partial(_norm, "rms_norm", backward=True), 0.55),
    "softmax": (_softmax, 0.25),
    "cross_entropy": (_cross_entropy, 0.35),
    "cross_entropy backward": (functools.partial(_cross_entropy, backward=True), 0.6),
    "adamw": (_adamw, 0.65),
    "embedding": (_embedding, 0.7),
    "embedding backward": (functools.partial(_embedding, backward=True), 0.11),
}


def graph_launches() -> list[dict[str, Any]]:
    """Many small kernels in a captured graph, beside the same kernels launched one by one."""
    x = torch.zeros(1024, device=device())

    def step() -> tuple[torch.Tensor, ...]:
        for _ in range(LAUNCHES):
            x.add_(1.0)
        return (x,)

    _, replay = repeatability.capture(step)
    eager = statistics.median(launches("eager", step))
    return [beside("graph of small kernels", launches("graph", replay), "eager", eager, LEAST_OF_EAGER)]


def launches(name: str, call: Call) -> list[float]:
    """Calls a second by the host's clock, which sees what launches cost, after one to warm up."""
    del name
    found = []
    for _ in range(2 * COUNT):
        synchronize()
        begin = time.perf_counter()
        call()
        synchronize()
        found.append(1 / (time.perf_counter() - begin))
    return found[1:]
