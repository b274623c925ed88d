"""One module's weights in one flat buffer, its gradients in another, and a slice of the optimizer's state.

In: a module on the meta device. Out: a Unit whose collectives read and write the buffers in place. Float32
master weights are the bfloat16 weights plus 16 more bits of each (ops.split).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import build
import ops
from errors import RefusedError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from options import Options
    from world import World

PAD = (
    128 * 9 * 5 * 7
)  # a flat buffer divides among 1 to 10, 12, 14, 16 … ranks, on addresses that kernels like
ALIGN = 64


class Unit:
    """One module's weights, gradients and optimizer slice."""

    def __init__(
        self, name: str, module: nn.Module, model: nn.Module, options: Options, world: World
    ) -> None:
        self.name, self.world = name, world
        self.half = options.precision != "fp32"
        self.plan, length = _plan(module, name)
        self.length = -(-length // PAD) * PAD
        if self.length % world.size:
            raise RefusedError(f"zero1 divides among ranks that divide {PAD}, not {world.size}")
        part = self.length // world.size
        self.mine = slice(world.rank * part, (world.rank + 1) * part)
        kind = torch.bfloat16 if self.half else torch.float32
        gradients = torch.float32 if options.reduce == "fp32" or not self.half else torch.bfloat16
        moments = torch.float32 if options.moments == "fp32" else torch.bfloat16
        self.weights = torch.zeros(self.length, device=world.device, dtype=kind)
        self.gradients = torch.zeros(self.length, device=world.device, dtype=gradients)
        self.low = torch.zeros(part, device=world.device, dtype=torch.int16) if self.half else None
        self.mean, self.variance = (torch.zeros(part, device=world.device, dtype=moments) for _ in range(2))
        self.slice = self.gradients[self.mine] if world.gpu else torch.zeros(part, dtype=gradients)
        self.fresh, self.last, self.missing, self.work = True, True, 0, None
        self.cache: dict[str, Any] = {}
        self._adopt(model, options)

    def _adopt(self, model: nn.Module, options: Options) -> None:
        """Draw each weight whole (so that its value depends on no layout), then point the module at the
        buffer.
        """
        exact = torch.zeros(self.length, device=self.world.device)
        for path, (parameter, offset) in self.plan.items():
            value = build.draw(path, parameter.shape, model.config.layers, options, self.world.device)
            exact[offset : offset + value.numel()] = value.flatten()
        self.take(exact)
        for path, (parameter, offset) in self.plan.items():
            view = torch.nn.Parameter(self._view(self.weights, parameter, offset))
            view.main_grad = self._view(self.gradients, parameter, offset)
            view.unit = self
            view.register_post_accumulate_grad_hook(self._collect)
            for owner, leaf in _owners(model, parameter):
                setattr(owner, leaf, view)
            self.plan[path] = (view, offset)

    @staticmethod
    def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def take(self, exact: Tensor) -> None:
        """Hold these float32 values."""
        if self.low is None:
            self.weights.copy_(exact)
            return
        low = torch.empty(self.length, device=exact.device, dtype=torch.int16)
        ops.split(exact, self.weights, low)
        self.low.copy_(low[self.mine])

    def master(self) -> Tensor:
        """This rank's slice of the float32 weights."""
        part = self.weights[self.mine]
        return part if self.low is None else ops.join(part, self.low)

    def _collect(self, parameter: nn.Parameter) -> None:
        """Move a gradient that autograd made into the buffer."""
        if self.fresh:
            parameter.main_grad.copy_(parameter.grad)
        else:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self.missing -= 1
        if self.missing == 0:
            self.ready()

    def begin(self, *, first: bool, last: bool) -> None:
        """Before a microbatch: whether gradients replace or add, and whether they leave afterwards."""
        self.fresh, self.last, self.missing = first, last, len(self.plan)

    def ready(self) -> None:
        """All gradients of the microbatch are in the buffer: with the last one, sum each rank's slice."""
        if not self.last:
            return
        if self.world.size == 1:
            self.slice = self.gradients
            return
        self.work = dist.reduce_scatter_tensor(self.slice, self.gradients, async_op=True)

    def wait(self) -> None:
        """Order the device (on a CPU, the caller) behind the collective under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def update(self, scale: Tensor, lr: float, step: int) -> None:
        """Step this rank's slice and send it to the others; `wait` before the weights are read."""
        args = (self.weights[self.mine], self.low, self.mean, self.variance, self.slice, scale)
        ops.pick("adamw_", self.world.device)(*args, lr=lr, step=step)
        self.cache.clear()
        self.gather()

    def gather(self) -> None:
        """Complete the weights from every rank's slice."""
        if self.world.size > 1:
            mine = self.weights[self.mine] if self.world.gpu else self.weights[self.mine].clone()
            self.work = dist.all_gather_into_tensor(self.weights, mine, async_op=True)


def _plan(module: nn.Module, prefix: str) -> tuple[dict[str, tuple[Tensor, int]], int]:
    """Offset of each weight in the flat buffer, and the buffer's length before padding."""
    plan, end = {}, 0
    for path, parameter in module.named_parameters():
        if parameter.is_meta:
            plan[f"{prefix}.{path}" if prefix else path] = (parameter, end)
            end += -(-parameter.numel() // ALIGN) * ALIGN
    return plan, end


def _owners(model: nn.Module, parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """Every place that holds this weight: tied weights have two."""
    return [(m, leaf) for m in model.modules() for leaf, p in m._parameters.items() if p is parameter]  # noqa: SLF001
