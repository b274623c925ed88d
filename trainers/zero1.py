"""ZeRO-1: every rank holds bfloat16 weights whole and a slice of the optimizer's state (arXiv 1910.02054,
stage 1).

In: a skeleton. Out: a Job. Each unit's weights lie in one flat buffer, and so do its gradients: the reduce-
scatter reads
the gradients where backward wrote them, the optimizer writes a slice of the weights, and the all-gather
completes the
buffer in place, so nothing is copied in or out of collectives. Float32 master weights are the bfloat16
weights plus 16
more bits of each (ops.split). Accumulation costs no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

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


class Zero1:
    """The Job of this layout."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        self.model, self.options, self.world = model, options, world
        self.data_rank, self.data_size = world.rank, world.size
        parts = [*build.units(model), ("", model)]
        if build.shares_weights(model):
            parts.insert(0, parts.pop())  # the tied embedding is used first
        plans = ((name, part) for name, part in parts if any(p.is_meta for p in part.parameters()))
        self.units = []
        for name, part in plans:
            unit = Unit(name, part, model, options, world)
            part.register_forward_pre_hook(lambda *_, unit=unit: unit.wait())
            self.units.append(unit)
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.steps, self.fresh = 0, True
        self.fused = options.implementation == "fused"
        if self.fused:
            import fused

            self.model = fused.Model(model, fp8=options.precision == "fp8")
        elif options.compile if options.compile is not None else world.gpu:
            for block in model.blocks.values():
                block.compile(fullgraph=getattr(model, "whole_graph", True))
        if options.recompute == "full" and not self.fused:
            build.recompute(model)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job; the sum over ranks is a mean because each share is divided by their number."""
        for unit in self.units:
            unit.begin(first=self.fresh, last=last)
        self.fresh = last
        share /= self.data_size
        if self.fused:
            self.model.share = share
            loss = self.model(**batch)
            loss.backward()
        else:
            loss = self.model(**batch)
            (loss * share).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """As Job."""
        self.steps += 1
        for unit in self.units:
            unit.wait()
        squares = [torch.linalg.vector_norm(unit.slice, dtype=torch.float32) for unit in self.units]
        total = torch.stack(squares).square().sum()
        if self.world.size > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        scale = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
        for unit in self.units:
            unit.update(scale, lr, self.steps)
        return norm

    def state(self) -> dict[str, Any]:
        """As Job: flat float32 tensors, sharded; their length does not depend on the number of ranks."""

        def spread(local: Tensor) -> DTensor:
            return DTensor.from_local(local.contiguous(), self.mesh, [Shard(0)], run_check=False)

        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for number, unit in enumerate(self.units):
            parts = {"master": unit.master(), "mean": unit.mean, "variance": unit.variance}
            state |= {f"{number}.{name}": spread(part) for name, part in parts.items()}
        return state

    def restore(self, state: dict[str, Any]) -> None:
        """As Job."""
        self.steps = int(state["steps"])
        for number, unit in enumerate(self.units):
            unit.mean.copy_(state[f"{number}.mean"].to_local())
            unit.variance.copy_(state[f"{number}.variance"].to_local())
            exact = state[f"{number}.master"].to_local()
            if unit.low is None:
                unit.weights[unit.mine].copy_(exact)
            else:
                ops.split(exact, unit.weights[unit.mine], unit.low)
            unit.cache.clear()
            unit.gather()
            unit.wait()

    def weights(self) -> dict[str, Tensor]:
        """As Job."""
        found = {}
        for unit in self.units:
            part = unit.master().contiguous()
            exact = torch.empty(unit.length, device=part.device)
            dist.all_gather_into_tensor(exact, part)
            for path, (parameter, offset) in unit.plan.items():
                found[path] = exact[offset : offset + parameter.numel()].view(parameter.shape).cpu()
        return found
