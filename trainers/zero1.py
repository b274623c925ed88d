"""ZeRO-1: every rank holds bfloat16 weights whole and a slice of the optimizer's state (arXiv 1910.02054,
stage 1).

In: a skeleton. Out: a Job. Each unit's weights lie in one flat buffer, and so do its gradients: the reduce-
scatter reads the gradients where backward wrote them, the optimizer writes a slice of the weights, and the
all-gather completes the buffer in place, so nothing is copied in or out of collectives. Float32 master
weights are the bfloat16 weights plus 16 more bits of each (ops.split). Accumulation costs no communication.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import build
import ops
import peaks
from flat import Unit

if TYPE_CHECKING:
    from torch import Tensor, nn

    from options import Options
    from world import World


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

            self.model = fused.Model(model, peaks.find(world), fp8=options.precision == "fp8")
        else:
            build.finish(model, options, gpu=world.gpu)

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
