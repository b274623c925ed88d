"""Generated programs: chains of operators, views, sums in place and autocast, compiled.

In: a source of numbers. Out: a call.

A compiled program may round in other places than eager does: its gate is eager's own distance from float64.
"""

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F

from workloads import operands
from workloads.generated_judge import FLOATS, Call

SIZES = (1, 3, 8, 17, 33, 64, 130)
LEAST, MOST = 3, 9
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _add_to_half(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., : x.shape[-1] // 2 + 1] += y[..., : x.shape[-1] // 2 + 1]
    return x


def _scaled_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    view = (x := x.clone()).t()
    view.mul_(y.t().sigmoid()).add_(0.5)
    return x


def _index_put(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(len(x), device=x.device) % 3 % len(x)
    return x.index_add(0, rows, y)


# Each keeps the shape (rows, columns), and mixes with the other tensor of the program.
STEPS: dict[str, Step] = {
    "add": lambda x, y: x + y,
    "times": lambda x, y: x * y.sigmoid(),
    "divided": lambda x, y: x / (y * y + 1),
    "gelu": lambda x, _: F.gelu(x),
    "silu": lambda x, _: F.silu(x),
    "tanh": lambda x, _: x.tanh(),
    "softmax": lambda x, _: x.softmax(-1),
    "softmax of columns": lambda x, _: x.softmax(0),
    "layer_norm": lambda x, _: F.layer_norm(x, x.shape[-1:], eps=0.1),
    "rms": lambda x, _: x * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt(),
    "less its mean": lambda x, _: x - x.mean(0, keepdim=True),
    "over its sum": lambda x, _: x / (x.abs().sum(0, keepdim=True) + 1),
    "product": lambda x, y: x @ (y.t() @ y) / (len(y) + 1),
    "cumsum": lambda x, _: x.cumsum(-1) / x.shape[-1],
    "flip": lambda x, _: x.flip(0),
    "roll": lambda x, _: x.roll(1, -1),
    "turned": lambda x, _: x.t().contiguous().reshape(x.shape),
    "halves": lambda x, y: torch.cat((x[:, ::2], y[:, 1::2]), -1),
    "padded": lambda x, _: F.pad(x, (1, 0))[:, :-1],
    "expanded": lambda x, y: x + y[:1].expand_as(x),
    "gathered": lambda x, _: x[torch.arange(len(x), device=x.device).flip(0) // 2],
    "where": lambda x, y: torch.where(y > 0, x, y),
    "clamp": lambda x, _: x.clamp(-2, 2),
    "sum to half": _add_to_half,
    "in place": _scaled_in_place,
    "index_add": _index_put,
    "stacked": lambda x, y: torch.stack((x, y)).amax(0),
    "rotated": lambda x, y: x * y.cos() + x.roll(x.shape[-1] // 2, -1) * y.sin(),
}


class Program:
    """Steps over two tensors; the second one takes the first one's place now and then."""

    def __init__(self, steps: list[str], autocast: torch.dtype | None) -> None:
        """The names of its steps, and the type of autocast."""
        self.steps, self.autocast = steps, autocast

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors at the end."""
        enabled = self.autocast is not None and x.dtype is torch.float32
        with torch.autocast(x.device.type, dtype=self.autocast, enabled=enabled):
            for number, name in enumerate(self.steps):
                x = STEPS[name](x, y.to(x.dtype))
                if number % 3 == 2:
                    x, y = y, x
        return x, y


def draw(source: random.Random, seed: int, backend: str) -> tuple[str, Call, Call]:
    """One program in words, compiled, and eager."""
    steps = [source.choice(list(STEPS)) for _ in range(source.randrange(LEAST, MOST))]
    dtype = source.choice(FLOATS)
    autocast = torch.bfloat16 if dtype is torch.float32 and source.random() < 0.3 else None
    program = Program(steps, autocast)
    shape = source.choice(SIZES), source.choice(SIZES)
    tensors = tuple(operands.normal(*shape, dtype=dtype, seed=seed % 2**31 + n) for n in (0, 1))
    if source.random() < 0.3:
        tensors = tensors[0].t().contiguous().t(), tensors[1]
    unit = autocast or dtype
    eager = Call(program, tensors, {}, unit, gradients=True, seed=seed)
    torch._dynamo.reset()
    compiled = torch.compile(program.__call__, backend=backend, dynamic=source.random() < 0.3, fullgraph=True)
    words = f"{' > '.join(steps)} of {dtype} {shape}{f' under autocast {autocast}' if autocast else ''}"
    return words, Call(**{**vars(eager), "function": compiled, "right": eager}), eager
