"""ZeRO-1: every data rank holds whole bfloat16 weights and a slice of the optimizer's state.

This is stage 1 of arXiv 1910.02054. It also works with tensor parallel, and inside the stages of pipeline.py.

In: a model on the meta device, Options. Out: a Job.

Each unit's weights lie in one flat buffer, and its gradients in another. The reduce-scatter reads gradients
where backward wrote them, the optimizer writes a slice of the weights, and the all-gather completes the
buffer in place: nothing is copied in or out of collectives, and accumulation costs no communication. Float32
master weights are the bfloat16 weights plus 16 more bits of each (`ops.split`).

With tensor parallel a buffer holds this tensor rank's shards, and then what all tensor ranks hold (norms,
embeddings). These collectives run between ranks with the same shards. Only the first tensor rank counts the
second part in the gradients' norm, so the sum over all ranks has every weight once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import peaks
from fused import ops
from layouts import flat, job, optimizer, prepare
from layouts.flat import ALIGN
from layouts.flat_unit import FlatUnit
from layouts.sharding import DTensor, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from fused import layer
    from models.layers import BlockModel
    from options import Options
    from world import World


class Zero1:
    """The Job of this layout. `data`: the ranks that hold the same weights and share their moments.

    `kept`: the ranks over which a checkpoint's tensors are spread. `counted`: the units that are in the norm.
    """

    def __init__(self, model: BlockModel, options: Options, world: World) -> None:
        self.options, self.world = options, world
        self.tp: DeviceMesh | None = None
        if options.tp * options.pp == 1:
            self.data = self.kept = self.mesh = init_device_mesh(world.device.type, (world.size,))
        else:
            self.mesh = job.mesh(options, world)
            self.data = self.kept = self.mesh["shard"]
        if options.tp > 1:
            self.tp, self.kept = self.mesh["tp"], self.mesh["shard", "tp"]
            for name, unit in prepare.units(model):
                prepare.split(model, name, unit, options, self.tp)
        self.data_rank, self.data_size = self.data.get_local_rank(), self.data.size()
        self.units = self.counted = flat_units(model, options, world, self.data)
        self.steps, self.fresh = 0, True
        self.fused: layer.Model | None = None
        self.model: BlockModel | layer.Model = model
        self.plain = model
        if options.implementation == "fused":
            from fused import layer

            again = prepare.recomputed(model, options)
            self.model = self.fused = layer.Model(
                model, peaks.find(world), fp8=options.precision == "fp8", again=again
            )
        else:
            for block in model.blocks.values():
                prepare.finish_block(model, block, options, gpu=world.gpu)
            prepare.finish_model(model, options, gpu=world.gpu)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """Ranks sum their gradients: the sum is a mean because `share` is divided by their number."""
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

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """A fused layer makes gradients in forward, so the model runs that it is made from."""
        with torch.no_grad():
            found: Tensor = self.plain(**batch)
        return found

    def step(self, lr: float) -> Tensor:
        for unit in self.units:
            unit.reduce_the_rest()
            unit.wait()
        first = self.tp is None or self.tp.get_local_rank() == 0
        total = torch.stack([unit.norm(common=first) for unit in self.counted]).square().sum()
        if self.world.size > 1:
            dist.all_reduce(total)
        norm = total.sqrt()
        if optimizer.skips(norm, self.options):
            for unit in self.units:  # the next microbatch replaces the gradients
                unit.cache.clear()
            return norm
        self.steps += 1
        scale = (self.options.clip / (norm + 1e-6)).clamp(max=1.0)
        for unit in self.units:
            unit.update(scale, lr, self.steps)
        return norm

    def state(self) -> dict[str, Any]:
        """As Job: tensors of rows, sharded; their number does not depend on the number of data ranks."""
        state: dict[str, Any] = {"steps": torch.tensor(self.steps)}
        for name, unit in self._named():
            parts = {"master": unit.master(), "mean": unit.mean, "variance": unit.variance}
            state |= {f"{name}.{part}": self._spread(unit, value) for part, value in parts.items()}
        return state

    def _named(self) -> list[tuple[str, FlatUnit]]:
        """Each unit with its name in a checkpoint; a pipeline's stages have names of their own."""
        stage = f"stage{self.mesh['pp'].get_local_rank()}." if self.options.pp > 1 else ""
        return [(f"{stage}{number}", unit) for number, unit in enumerate(self.units)]

    def _spread(self, unit: FlatUnit, local: Tensor) -> DTensor:
        """This rank's rows of a flat tensor, without padding; with tensor parallel, for each tensor rank."""
        rows, places = local[: unit.own].view(-1, ALIGN), [Shard(0)]
        shape: tuple[int, ...] = (unit.length // ALIGN, ALIGN)
        if self.tp is not None:
            rows, places, shape = rows[None], [Shard(1), Shard(0)], (self.tp.size(), *shape)
        whole = torch.empty(shape, device="meta")
        return DTensor.from_local(
            rows, self.kept, places, run_check=False, shape=whole.shape, stride=whole.stride()
        )

    def state_bytes(self) -> int:
        held = (part for unit in self.units for part in (unit.low, unit.mean, unit.variance))
        return sum(part.nbytes for part in held if part is not None)

    def restore(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        for name, unit in self._named():
            parts = ("mean", "variance", "master")
            mean, variance, exact = (state[f"{name}.{part}"].to_local().flatten() for part in parts)
            unit.mean[: unit.own].copy_(mean)
            unit.variance[: unit.own].copy_(variance)
            weights = unit.weights[unit.mine][: unit.own]
            if unit.low is None:
                weights.copy_(exact)
            else:
                ops.split(exact, weights, unit.low[: unit.own])
            unit.cache.clear()
            unit.gather()
            unit.wait()

    def shapes(self) -> dict[str, torch.Size]:
        held = {path: weight.shape for unit in self.units for path, (weight, _) in unit.offsets.items()}
        return dict(sorted(held.items()))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As Job; a unit is gathered at a time."""
        homes = {path: unit for unit in self.units for path in unit.offsets}
        home, exact = None, torch.empty(0)
        for path, unit in sorted(homes.items(), key=lambda pair: pair[0]):
            if unit is not home:
                home, part = unit, unit.master().contiguous()
                exact = torch.empty_like(unit.weights, dtype=part.dtype)
                dist.all_gather_into_tensor(exact, part, group=self.data.get_group())
            parameter, offset = unit.offsets[path]
            whole = flat.spread_as(parameter, flat.view(exact, parameter, offset))
            yield path, (whole.full_tensor() if isinstance(whole, DTensor) else whole).detach().cpu()


def flat_units(model: BlockModel, options: Options, world: World, data: DeviceMesh) -> list[FlatUnit]:
    """Every unit with weights, in the order of forward; each waits for its weights before it runs.

    The root comes last here, so that it takes what is left: made first, it would take the weights of all
    blocks, and hold them all in float32 at once.
    """
    tied, found = prepare.ties_weights(model), []
    for name, part, runs in _parts(model):
        if not any(parameter.is_meta for parameter in part.parameters()):
            continue  # an earlier unit took all of its weights
        unit = FlatUnit(name, part, model, options=options, world=world, data=data)
        runs.register_forward_pre_hook(lambda *_, unit=unit: unit.wait())
        found.append(unit)
    if tied:
        found.insert(0, found.pop())  # the tied embedding is in the root, and is used first
    return found


def _parts(model: BlockModel) -> Iterator[tuple[str, nn.Module, nn.Module]]:
    """Each part with a unit of its own, with its name, and the module before which its weights must be there.

    A copy of another stage's weight is alone in its unit, as the weight is there: their slices are equal.
    """
    for name, part in (*prepare.units(model), ("", model)):
        for path in model.copies:
            owner = path.rpartition(".")[0]
            if owner.startswith(f"{name}.") and name:
                yield owner, model.get_submodule(owner), part
        yield name, part, part
