"""Pipeline parallel: each rank of `pp` holds some layers, and microbatches flow through them.

The schedule is 1F1B (arXiv 2104.04473).

In: a family and its config, built stage by stage. Out: a Job. Tensor parallel works inside a stage, and so
does FSDP2 or ZeRO-1. The microbatches of a step are collected, then run through torch's schedule together. Of
a tied embedding two stages hold a copy (tied.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from errors import RefusedError
from layouts import flat, fsdp2, prepare, zero1
from layouts.tied import FIRST, LAST, Tie

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from layouts.job import Job
    from models.layers import BlockModel
    from options import Options
    from plan import Plan
    from world import World

# Each stage has its own keys. Unflattened, the optimizer's state is a list whose keys two stages would share.
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


def create(family: Any, config: Any, chunks: int, *, plan: Plan, options: Options, world: World) -> Job:
    """The Job of this rank's stage."""
    if config.layers < options.pp or plan.accumulate < options.pp:
        raise RefusedError(
            f"--pp {options.pp} needs at least {options.pp} layers and {options.pp} microbatches a step, "
            f"got {config.layers} and {plan.accumulate}; lower --pp, or raise --global-batch"
        )
    place = (world.rank * options.pp // world.size, options.pp)  # pp is the outermost dimension of job.mesh
    model = prepare.skeleton(family, config, loss_chunks=chunks, stage=place)
    if config.tied and model.head is not None:
        model.copies = {LAST: FIRST}
    if options.parallel == "zero1":
        return PipelinedZero1(model, plan, options, world)
    return Pipelined(model, plan, options, world)


class Flow:
    """torch's schedule over the stage that this rank holds. Backward is of `factor` x loss."""

    def __init__(
        self, model: BlockModel, microbatches: int, world: World, *, group: dist.ProcessGroup, factor: float
    ) -> None:
        self.world, self.group, self.factor = world, group, factor
        # The schedule concatenates a stage's outputs, and torch.cat takes no scalars.
        model.register_forward_hook(lambda _module, _inputs, out: out.reshape(1) if out.dim() == 0 else out)
        place = (dist.get_rank(group), dist.get_world_size(group))
        self.stage = PipelineStage(model, *place, world.device, group=group)
        self.schedule = Schedule1F1B(
            self.stage, microbatches, loss_fn=lambda loss, _target: loss.mean() * factor
        )
        self.waiting: list[dict[str, Tensor]] = []

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job; the last call runs all microbatches of the step and returns the sum of their losses."""
        self.waiting.append(batch)
        if not last:
            return torch.zeros((), device=self.world.device)
        batches, self.waiting = self.waiting, []
        tokens, labels = (torch.cat([b[name] for b in batches]) for name in ("tokens", "labels"))
        losses: list[Tensor] = []
        inputs = (tokens,) if self.stage.is_first else ()
        ends = {"target": labels, "losses": losses, "labels": labels} if self.stage.is_last else {}
        self.schedule.step(*inputs, **ends)
        total = torch.zeros((), device=self.world.device)
        if losses:
            total += torch.stack(losses).detach().mean() / self.factor
        dist.all_reduce(total, group=self.group)
        return total / share

    def shapes(self, own: dict[str, torch.Size]) -> dict[str, tuple[torch.Size, int]]:
        """The shape of each weight of all stages, and the stage that has it."""
        stages: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(stages, own, group=self.group)
        found = {name: (shape, stage) for stage, held in enumerate(stages) for name, shape in held.items()}
        return dict(sorted(found.items()))

    def gather(
        self, own: Iterator[tuple[str, Tensor]], shapes: dict[str, torch.Size]
    ) -> Iterator[tuple[str, Tensor]]:
        """The weights of all stages; the stage that has one sends it to the others."""
        for name, (shape, stage) in self.shapes(shapes).items():
            if stage == dist.get_rank(self.group):
                value = next(own)[1].to(self.world.device)
            else:
                value = torch.empty(shape, device=self.world.device)
            dist.broadcast(value, dist.get_global_rank(self.group, stage), group=self.group)
            yield name, value.cpu()


class Pipelined(fsdp2.Fsdp2):
    """The Job with FSDP2 inside a stage."""

    form = FLATTENED

    def __init__(self, model: BlockModel, plan: Plan, options: Options, world: World) -> None:
        super().__init__(model, options, world)
        self.stages = self.mesh["pp"].get_group()
        self.tie = Tie(model, self.mesh) if model.config.tied else None
        self.flow = Flow(model, plan.accumulate, world, group=self.stages, factor=1.0)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        return self.flow.microbatch(batch, last=last, share=share)

    def step(self, lr: float) -> Tensor:
        if self.tie and self.tie.name:
            self.tie.sum(flat.local(self.model.get_parameter(self.tie.name).grad))
        return super().step(lr)

    def counted(self) -> Iterator[tuple[str, Tensor]]:
        """As Fsdp2; of a tied embedding the first copy."""
        return ((name, weight) for name, weight in super().counted() if not (self.tie and name == LAST))

    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for name, (shape, _) in self.flow.shapes(super().shapes()).items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.flow.gather(super().weights(), super().shapes())


class PipelinedZero1(zero1.Zero1):
    """The Job with ZeRO-1 inside a stage."""

    def __init__(self, model: BlockModel, plan: Plan, options: Options, world: World) -> None:
        super().__init__(model, options, world)
        self.passes = plan.accumulate
        # The data ranks sum their gradients, and the schedule's division does not see them: both means are
        # made here.
        factor = 1 / (self.passes * self.data_size)
        self.flow = Flow(model, self.passes, world, group=self.mesh["pp"].get_group(), factor=factor)
        self.tie = Tie(model, self.mesh) if model.config.tied else None
        # The copies are alone in their units, whose slices are then equal on both stages.
        copies = [unit for unit in self.units if self.tie and self.tie.name in unit.offsets]
        self.copy = copies[0] if copies else None
        if self.tie and self.tie.name == LAST:
            self.counted = [unit for unit in self.units if unit is not self.copy]

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        if last:
            for unit in self.units:
                unit.begin_many(self.passes)
        return self.flow.microbatch(batch, last=last, share=share)

    def step(self, lr: float) -> Tensor:
        if self.tie and self.copy:
            self.copy.wait()
            self.tie.sum(self.copy.slice)
        return super().step(lr)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: shape for name, (shape, _) in self.flow.shapes(super().shapes()).items()}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.flow.gather(super().weights(), super().shapes())
