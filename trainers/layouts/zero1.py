"""ZeRO-1: every rank holds whole bfloat16 weights and a slice of the optimizer's state (arXiv 1910.02054,
stage 1).

In: a model on the meta device, Options. Out: a Job.

Each unit's weights lie in one flat buffer, and its gradients in another. The reduce-scatter reads gradients
where backward wrote them, the optimizer writes a slice of the weights, and the all-gather completes the
buffer in place: nothing is copied in or out of collectives, and accumulation costs no communication. Float32
master weights are the bfloat16 weights plus 16 more bits of each (`ops.split`).
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import peaks
from errors import RefusedError
from fused import ops
from layouts import prepare
from layouts.sharding import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

    from fused import layer
    from models.layers import BlockModel
    from options import Options
    from world import World

# A buffer of a multiple of this many elements divides among 1 to 10, 12, 14, 16 … ranks, and each slice
# begins at an address that kernels read fast.
PAD = 128 * 9 * 5 * 7
ALIGN = 64  # elements; each weight begins at a multiple


class Zero1:
    """The Job of this layout; every rank is a data rank."""

    def __init__(self, model: BlockModel, options: Options, world: World) -> None:
        self.options, self.world = options, world
        self.data_rank, self.data_size = world.rank, world.size
        self.units = flat_units(model, options, world)
        self.mesh = init_device_mesh(world.device.type, (world.size,))
        self.steps, self.fresh = 0, True
        self.fused: layer.Model | None = None
        self.model: BlockModel | layer.Model = model
        if options.implementation == "fused":
            from fused import layer

            self.model = self.fused = layer.Model(model, peaks.find(world), fp8=options.precision == "fp8")
        else:
            prepare.compile_and_recompute(model, options, gpu=world.gpu)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job. Ranks sum their gradients: the sum is a mean because `share` is divided by their number."""
        for unit in self.units:
            unit.begin(first=self.fresh, last=last)
        self.fresh = last
        share /= self.data_size
        if self.fused is not None:
            self.fused.share = share  # the fused loss makes gradients in forward, already scaled
            loss: Tensor = self.fused(**batch)
            loss.backward()
            return loss.detach()
        loss = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """As Job."""
        self.steps += 1
        for unit in self.units:
            unit.wait()
        norms = [torch.linalg.vector_norm(unit.slice, dtype=torch.float32) for unit in self.units]
        total = torch.stack(norms).square().sum()
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
            for path, (parameter, offset) in unit.offsets.items():
                found[path] = exact[offset : offset + parameter.numel()].view(parameter.shape).cpu()
        return found


def flat_units(model: BlockModel, options: Options, world: World) -> list[FlatUnit]:
    """Every unit with weights, in the order of forward; each waits for its weights before it runs."""
    parts = [*prepare.units(model), ("", model)]
    if prepare.ties_weights(model):
        parts.insert(0, parts.pop())  # the tied embedding is in the root, and is used first
    found = []
    for name, part in parts:
        if not any(parameter.is_meta for parameter in part.parameters()):
            continue  # an earlier unit took all of its weights
        unit = FlatUnit(name, part, model, options, world)
        part.register_forward_pre_hook(lambda *_, unit=unit: unit.wait())
        found.append(unit)
    return found


class FlatUnit:
    """One module's weights and gradients in flat buffers, and this rank's slice of the optimizer's state.

    `low`: the lower 16 bits of this rank's float32 weights; None where weights are float32 themselves.
    `mine`: this rank's slice of the buffers. `slice`: the gradients of `mine`, summed over the ranks.
    `fresh`: the next gradients replace the buffer's; otherwise they add up. `work`: the collective under way.
    `cache`: the FP8 copies of the weights, valid until the next update.
    """

    def __init__(
        self, name: str, module: nn.Module, model: BlockModel, options: Options, world: World
    ) -> None:
        self.name, self.world = name, world
        self.offsets, length = _offsets(module, name)
        self.length = -(-length // PAD) * PAD
        if self.length % world.size:
            raise RefusedError(
                f"--parallel zero1 needs a number of ranks that divides {PAD}, got {world.size}; start fewer"
            )
        part = self.length // world.size
        self.mine = slice(world.rank * part, (world.rank + 1) * part)
        half = options.below_fp32
        kind = torch.bfloat16 if half else torch.float32
        gradients = torch.float32 if options.reduce == "fp32" or not half else torch.bfloat16
        moments = torch.float32 if options.moments == "fp32" else torch.bfloat16
        self.weights = torch.zeros(self.length, device=world.device, dtype=kind)
        self.gradients = torch.zeros(self.length, device=world.device, dtype=gradients)
        self.low = torch.zeros(part, device=world.device, dtype=torch.int16) if half else None
        self.mean, self.variance = (torch.zeros(part, device=world.device, dtype=moments) for _ in range(2))
        # On a GPU the reduction is in place; gloo gets an output of its own.
        self.slice = self.gradients[self.mine] if world.gpu else torch.zeros(part, dtype=gradients)
        self.fresh, self.last, self.missing = True, True, 0
        self.work: dist.Work | None = None
        self.cache: dict[int, Any] = {}
        self._adopt(model, options)

    def _adopt(self, model: BlockModel, options: Options) -> None:
        """Draw each weight whole, so that its value depends on no layout, and point the module
        at the buffer.
        """
        exact = torch.zeros(self.length, device=self.world.device)
        for path, (parameter, offset) in self.offsets.items():
            value = prepare.initial_value(
                path, parameter.shape, model.config.layers, options, self.world.device
            )
            exact[offset : offset + value.numel()] = value.flatten()
        self.hold(exact)
        for path, (parameter, offset) in self.offsets.items():
            view = torch.nn.Parameter(_view(self.weights, parameter, offset))
            view.main_grad = _view(self.gradients, parameter, offset)
            view.unit = self
            # Not the method itself: the collector does not see what a hook holds, so the unit would stay.
            view.register_post_accumulate_grad_hook(_weakly(self._collect))
            for owner, leaf in _owners(model, parameter):
                setattr(owner, leaf, view)
            self.offsets[path] = (view, offset)

    def hold(self, exact: Tensor) -> None:
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
        """Before a microbatch: the first one of a step replaces gradients, the last one has them reduced."""
        self.fresh, self.last, self.missing = first, last, len(self.offsets)

    def ready(self) -> None:
        """All gradients of a microbatch are in the buffer; after the last one, start the reduce-scatter."""
        if not self.last:
            return
        if self.world.size == 1:
            self.slice = self.gradients
            return
        self.work = dist.reduce_scatter_tensor(self.slice, self.gradients, async_op=True)

    def wait(self) -> None:
        """Make the device (on a CPU, the caller) wait for the collective under way."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def update(self, scale: Tensor, lr: float, step: int) -> None:
        """Step this rank's slice and send it to the others; `wait` before the weights are read."""
        parts = (self.weights[self.mine], self.low, self.mean, self.variance, self.slice, scale)
        ops.pick("adamw_", self.world.device)(*parts, lr=lr, step=step)
        self.cache.clear()
        self.gather()

    def gather(self) -> None:
        """Start completing the weights from every rank's slice."""
        if self.world.size > 1:
            mine = self.weights[self.mine] if self.world.gpu else self.weights[self.mine].clone()
            self.work = dist.all_gather_into_tensor(self.weights, mine, async_op=True)


def _weakly(method: Callable[[nn.Parameter], None]) -> Callable[[nn.Parameter], None]:
    """A hook that does not keep the object of its method alive."""
    held = weakref.WeakMethod(method)

    def hook(parameter: nn.Parameter) -> None:
        found = held()
        assert found is not None, "a gradient came after its layout was gone"
        found(parameter)

    return hook


def _offsets(module: nn.Module, prefix: str) -> tuple[dict[str, tuple[Tensor, int]], int]:
    """Offset of each weight in the flat buffer, and the buffer's length before padding."""
    found: dict[str, tuple[Tensor, int]] = {}
    end = 0
    for path, parameter in module.named_parameters():
        if parameter.is_meta:
            found[f"{prefix}.{path}" if prefix else path] = (parameter, end)
            end += -(-parameter.numel() // ALIGN) * ALIGN
    return found, end


def _view(flat: Tensor, parameter: Tensor, offset: int) -> Tensor:
    return flat[offset : offset + parameter.numel()].view(parameter.shape)


def _owners(model: nn.Module, parameter: Tensor) -> list[tuple[nn.Module, str]]:
    """Every module and attribute that holds this weight: a tied weight has two."""
    return [(m, leaf) for m in model.modules() for leaf, p in m._parameters.items() if p is parameter]  # noqa: SLF001
