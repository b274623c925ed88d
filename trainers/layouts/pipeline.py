"""Pipeline parallel: each rank of `pp` holds some layers, microbatches flow through them (1F1B, arXiv
2104.04473).

In: a family and its config, built stage by stage. Out: a Job. Tensor parallel and FSDP2 work inside a stage.
The microbatches of a step are collected, then run through torch's schedule together. A tied head is untied,
because its two places are on two ranks.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from errors import RefusedError
from layouts import fsdp2, job, optimizer, prepare

if TYPE_CHECKING:
    from torch import Tensor

    from options import Options
    from plan import Plan
    from world import World

# Each stage has its own keys. Unflattened, the optimizer's state is a list whose keys two stages would share.
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class Pipelined(fsdp2.Fsdp2):
    """The Job of this layout."""

    def __init__(
        self, family: Any, config: Any, chunks: int, *, plan: Plan, options: Options, world: World
    ) -> None:
        if config.layers < options.pp or plan.accumulate < options.pp:
            raise RefusedError(
                f"--pp {options.pp} needs at least {options.pp} layers and {options.pp} microbatches a step, "
                f"got {config.layers} and {plan.accumulate}; lower --pp, or raise --global-batch"
            )
        self.meshes = job.mesh(options, world)
        place = (self.meshes["pp"].get_local_rank(), options.pp)
        config = dataclasses.replace(config, tied=False)
        super().__init__(prepare.skeleton(family, config, loss_chunks=chunks, stage=place), options, world)
        self.group, self.world = self.meshes["pp"].get_group(), world
        # The schedule concatenates a stage's outputs, and torch.cat takes no scalars.
        self.model.register_forward_hook(
            lambda _module, _inputs, out: out.reshape(1) if out.dim() == 0 else out
        )
        self.stage = PipelineStage(self.model, *place, world.device, group=self.group)
        self.schedule = Schedule1F1B(self.stage, plan.accumulate, loss_fn=lambda loss, _target: loss.mean())
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
            total += torch.stack(losses).detach().mean()
        dist.all_reduce(total, group=self.group)
        return total / share

    def step(self, lr: float) -> Tensor:
        """As Job."""
        norm = optimizer.global_norm(self.model.parameters(), self.group)
        optimizer.clip_gradients(self.model.parameters(), norm, self.options.clip)
        optimizer.update(self.optimizer, lr)
        return norm

    def state(self) -> dict[str, Any]:
        """As Job."""
        model, moments = get_state_dict(self.model, self.optimizer, options=FLATTENED)
        return {"model": model, "optimizer": moments}

    def restore(self, state: dict[str, Any]) -> None:
        """As Job."""
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts, options=FLATTENED)

    def weights(self) -> dict[str, Tensor]:
        """As Job."""
        stages: list[Any] = [None] * self.options.pp
        dist.all_gather_object(stages, super().weights(), group=self.group)
        return {name: value for stage in stages for name, value in stage.items()}
