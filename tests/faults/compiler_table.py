"""The mutants of compiled code and of packages as a table, as in `kernel_table`. Nothing runs here."""

# ruff: noqa: E501 - a table of faults reads in rows
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, ScanOps

import package_standins as packages
from compiler_checks import Tuner
from kernel_changes import Mutate, WithGradient, after, bad_backward, zero_tile
from kernel_table import Mutant
from workloads import triton_kernels

COMPILE = (torch, "compile")
MULTIPLY = (triton_kernels, "multiply")


def compiles_to(change: Mutate) -> Mutate:
    """What is compiled is another function than the one that was given."""

    def mutant(original: Callable[..., Any], step: Any, **options: Any) -> Any:
        del original, options
        return lambda *args: change(step, *args)

    return mutant


def loses_a_slice(step: Mutate, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A quarter of the table's gradient is never written (pytorch/pytorch#193061)."""
    return step(x, WithGradient.apply(table, lambda grad: grad.view(-1)[-grad.numel() // 4 :].fill_(0.1)))


def loses_the_gradient(step: Mutate, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
    """The gradient of the first argument is zero (pytorch/pytorch#180642)."""
    return step(x.detach() + 0 * x, *rest)


def forgets_norms(step: Any, x: torch.Tensor, *context: Any) -> torch.Tensor:
    """The gradient of the weights is a hundredth too large."""
    out = step(x, *context)
    return out + 0.01 * (out - out.detach())


def wrong_row(original: Any, x: torch.Tensor, *rest: Any) -> torch.Tensor:
    """The last row of each product is half as large again, in eager mode too."""
    out = original(x, *rest)
    if out.dtype is torch.float64:
        return out
    return torch.cat([out[..., :-1, :], out[..., -1:, :] * 1.5], -2) if out.ndim > 2 else out


def without_accumulator(original: Any, self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
    """A product forgets what it should add to."""
    d.data = d.data * 0
    return original(self, a, b, d, *rest)


def not_turned(original: Any, self: Any, arg: Any, order: Any) -> Any:
    """A square tile is not turned."""
    if arg.data.shape[0] == arg.data.shape[1] == triton_kernels.SIDE:
        order = [0, 1]
    return original(self, arg, order)


def wrong_in(tile: triton_kernels.Tile) -> Callable[..., None]:
    """One tile loses its last column."""

    def mutant(original: Any, a: Any, b: Any, out: Any, used: Any, **options: Any) -> None:
        original(a, b, out, used, **options)
        if used == tile:
            out[:, -1] = 0

    return mutant


def beyond(original: Any, a: Any, b: Any, out: Any, *rest: Any, **options: Any) -> None:
    """One element past the end of the output is written."""
    original(a, b, out, *rest, **options)
    end = out.storage_offset() + out.numel()
    if out.untyped_storage().nbytes() > end * out.element_size():
        torch.as_strided(out, (1,), (1,), end).zero_()


def scaled(original: Any, self: Any, values: Any) -> Any:
    out = original(self, values)
    out.handle.data = out.handle.data * np.float32(1.001)
    return out


def last_of_equals(original: Any, self: Any, values: Any, *operations: Any, **options: Any) -> Any:
    """The place of the largest is the last of equals."""
    if options.get("idx_reduce_op") in (np.argmax, np.nanargmax):  # the latter since Triton 3.9
        options["idx_reduce_op"] = lambda data, **_: np.int32(data.size - 1 - np.argmax(data[::-1]))
    return original(self, values, *operations, **options)


def skips_one(original: Any, self: Any, values: Any) -> Any:
    (out,) = original(self, values)
    out.handle.data[500:] -= values.handle.data[500]
    return [out]


def tuned_wrong(original: Any, a: Any, b: Any, out: Any) -> None:
    original(a, b, out)
    out[0, 0] *= -1


MUTANTS: dict[str, Mutant] = {
    **{f"a compiled block of {family} has larger gradients": (f"compiled {family}", COMPILE, compiles_to(forgets_norms)) for family in ("llama", "flux", "moe")},
    "the products of llama are wrong in eager mode too": ("compiled llama", (torch.nn.functional, "linear"), wrong_row),
    "a compiled block loses a row of dx": ("compiled llama", COMPILE, compiles_to(bad_backward(0))),
    "a slice of a compiled table's gradient is not written": ("compiled norms", COMPILE, compiles_to(loses_a_slice)),
    "a compiled function loses its gradient": ("compiled functions", COMPILE, compiles_to(loses_the_gradient)),
    "one tile of Triton loses a column": ("triton products", MULTIPLY, wrong_in(triton_kernels.TILES[3])),
    "a Triton product writes past its output": ("triton products", MULTIPLY, beyond),
    "the tuned tile is wrong": ("triton products", (Tuner, "tuned"), tuned_wrong),
    "a Triton product forgets its accumulator": ("triton products", (InterpreterBuilder, "create_dot"), without_accumulator),
    "a Triton tile is not turned": ("triton chains", (InterpreterBuilder, "create_trans"), not_turned),
    "torchao's layer loses a row of dx": ("layers of torchao", (packages.Float8Linear, "forward"), bad_backward(1)),
    "torchao leaves a layer in 16 bits": ("layers of torchao", (packages.MODULES["torchao.float8"], "convert_to_float8_training"), lambda _original, model, **_: model),
    "int8 weights zero a tile": ("layers of torchao", (packages.Int8Linear, "forward"), after(zero_tile)),
    "Liger's norm has another epsilon": ("layers of liger-kernel", (packages.LigerRMSNorm, "__init__"), lambda original, self, size, **_: original(self, size, 1e-1)),
    "Liger's LayerNorm loses a row of dx": ("layers of liger-kernel", (packages.LigerLayerNorm, "forward"), bad_backward(1)),
    "Liger's MLP zeroes a tile": ("layers of liger-kernel", (packages.LigerSwiGLUMLP, "forward"), after(zero_tile)),
    "Liger's loss counts ignored rows": (
        "layers of liger-kernel",
        (packages.LigerCrossEntropyLoss, "forward"),
        lambda original, self, x, target: original(self, x, target) * 0.8,
    ),
    "int8 operands zero a tile": ("layers of bitsandbytes", (packages.Linear8bitLt, "forward"), after(zero_tile)),
    "NF4 weights have another sign": ("layers of bitsandbytes", (packages.BITSANDBYTES.functional, "dequantize_4bit"), after(lambda out: out[0].neg_())),
    "te.Linear loses a row of dx": ("layers of transformer-engine-torch", (packages.TeLinear, "forward"), bad_backward(1)),
    "te.LayerNormMLP loses a row of dx": ("layers of transformer-engine-torch", (packages.LayerNormMLP, "forward"), bad_backward(1)),
    "te's attention of packed sequences loses dk": (
        "layers of transformer-engine-torch",
        (packages.DotProductAttention, "forward"),
        lambda original, self, q, k, v, **options: original(
            self, q, k.detach() + 0 * k if self.packed else k, v, **options
        ),
    ),
    "a Triton sum is off by a thousandth": ("triton reductions", (ReduceOps, "sum"), scaled),
    "Triton takes the last of equals": ("triton reductions", (ReduceOps, "min_max"), last_of_equals),
    "a Triton prefix sum skips an element": ("triton reductions", (ScanOps, "cumsum"), skips_one),
}  # fmt: skip
