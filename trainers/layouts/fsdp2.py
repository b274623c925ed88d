"""FSDP2: each unit's parameters are sharded, and gathered when the unit runs.

It also works with replicas (HSDP) and tensor parallel.

In: a model on the meta device, Options. Out: a Job.
https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from layouts import fp8_weights, job, optimizer, prepare
from layouts.sharding import DTensor, MixedPrecisionPolicy, fully_shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule

    from models.layers import BlockModel
    from options import Options
    from world import World


class Fsdp2:
    """FSDP2 over the dimensions shard and replicas, tensor parallel over tp.

    `stages`: of a pipeline. `form`: of the state in a checkpoint.
    """

    stages: dist.ProcessGroup | None = None
    form: StateDictOptions | None = None

    def __init__(self, model: BlockModel, options: Options, world: World) -> None:
        self.options, self.mesh, self.model = options, job.mesh(options, world), model
        self.sharded = shard(model, options, world, self.mesh)
        self.data_size = self.mesh["shard"].size() * self.mesh["replicas"].size()
        self.data_rank = self.mesh["replicas"].get_local_rank() * self.mesh["shard"].size()
        self.data_rank += self.mesh["shard"].get_local_rank()
        self.optimizer = optimizer.adamw(model, options, optimizer.matrices(model))
        fp8_weights.compute_scales(model)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """The last microbatch of a step frees gathered weights, and it or each one reduces gradients."""
        self.sharded.set_requires_gradient_sync(last or self.options.reduce_each)
        self.sharded.set_reshard_after_backward(last)
        loss: Tensor = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model(**batch)
        return found

    def step(self, lr: float) -> Tensor:
        optimizer.fill_gradients(self.model)
        norm = optimizer.global_norm((weight for _, weight in self.counted()), self.stages)
        if optimizer.skips(norm, self.options):
            self.optimizer.zero_grad()
            return norm
        optimizer.clip_gradients(self.model.parameters(), norm, self.options.clip)
        optimizer.update(self.optimizer, lr)
        fp8_weights.compute_scales(self.model)
        return norm

    def counted(self) -> Iterator[tuple[str, Tensor]]:
        """The weights whose gradients are in the norm, with their names."""
        yield from self.model.named_parameters()

    def state(self) -> dict[str, Any]:
        model, moments = get_state_dict(self.model, self.optimizer, options=self.form)
        return {"model": {name: fp8_weights.plain(x) for name, x in model.items()}, "optimizer": moments}

    def restore(self, state: dict[str, Any]) -> None:
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **parts, options=self.form)
        fp8_weights.compute_scales(self.model)

    def state_bytes(self) -> int:
        return optimizer.state_bytes(self.optimizer)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in sorted(self.model.state_dict().items())}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, whole(value)) for name, value in sorted(self.model.state_dict().items()))


def whole(value: Tensor) -> Tensor:
    """A tensor that may be spread over ranks, whole, in float32 on the CPU."""
    value = fp8_weights.plain(value)
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().float().cpu()


def shard(model: BlockModel, options: Options, world: World, meshes: DeviceMesh) -> FSDPModule:
    """Give weights to each unit and shard it at once, then the root.

    The last unit stays gathered: backward uses it at once.
    """
    over = meshes["replicas", "shard"] if options.replicas > 1 else meshes["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if options.below_fp32 else None,
        reduce_dtype=torch.float32 if options.reduce == "fp32" else torch.bfloat16,
        cast_forward_inputs=False,  # embeddings are bfloat16 already; the rotary table must stay float32
    )

    def shard_unit(name: str, unit: nn.Module) -> None:
        fp8_weights.unwrap_uneven(unit, meshes["shard"].size())
        stays = name == "head" or not options.reshard
        fully_shard(unit, mesh=over, mp_policy=policy, reshard_after_forward=not stays)

    prepare.prepare(model, options, world, meshes["tp"], shard_unit)
    fully_shard(model, mesh=over, mp_policy=policy)
    return cast("FSDPModule", model)  # fully_shard changes the model's class in place
