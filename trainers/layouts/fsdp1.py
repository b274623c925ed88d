"""FSDP1 with four strategies: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD.

In: a model on the meta device, Options. Out: a Job. torch calls FSDP1 deprecated, but the published figures
of LLM Foundry and AMD come from it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from layouts import fsdp2, job, optimizer, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from models.layers import BlockModel
    from options import Options
    from world import World

STRATEGY = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
}


class Fsdp1:
    """The Job of this layout; every rank is a data rank."""

    def __init__(self, model: BlockModel, options: Options, world: World) -> None:
        self.options = options
        prepare.prepare(model, options, world, None)
        self.data_rank, self.data_size = world.rank, world.size
        # no_sync adds up gradients on each rank in the type of the products: in bfloat16, whatever --reduce
        # says, and never where parameters are whole (torch 2.13). What is reduced adds up in float32. So each
        # microbatch is reduced; with --reduce bf16 the last one alone. The means over the ranks of all
        # microbatches add up to the mean over the ranks of their sums.
        whole = world.size == 1 or options.parallel == "no_shard"
        self.reduces_each = whole or (options.below_fp32 and options.reduce == "fp32")
        decays = optimizer.matrices(model)
        self.model = wrap(model, options, world)
        self.optimizer = optimizer.adamw(self.model, options, decays)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        if last or self.reduces_each:
            return self._forward_backward(batch, share)
        with self.model.no_sync():
            return self._forward_backward(batch, share)

    def _forward_backward(self, batch: dict[str, Tensor], share: float) -> Tensor:
        loss: Tensor = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            found: Tensor = self.model(**batch)
        return found

    def step(self, lr: float) -> Tensor:
        norm = self.model.clip_grad_norm_(self.options.clip)
        if optimizer.skips(norm, self.options):
            self.optimizer.zero_grad()
            return norm
        optimizer.update(self.optimizer, lr)
        return norm

    def state(self) -> dict[str, Any]:
        model, moments = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": moments}

    def restore(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def state_bytes(self) -> int:
        return optimizer.state_bytes(self.optimizer)

    def shapes(self) -> dict[str, torch.Size]:
        return {name: value.shape for name, value in sorted(self._whole().items())}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """As Job; FSDP1 gathers them all at once, as it held them when the job began."""
        return ((name, fsdp2.whole(value)) for name, value in sorted(self._whole().items()))

    def _whole(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=False)
        )
        return found


def wrap(model: BlockModel, options: Options, world: World) -> FullyShardedDataParallel:
    """The model in FSDP1, each block a unit."""
    meshes = job.mesh(options, world)
    hybrid = options.parallel == "hybrid_shard"
    precision = MixedPrecision(
        param_dtype=torch.bfloat16 if options.below_fp32 else torch.float32,
        reduce_dtype=torch.float32 if options.reduce == "fp32" else torch.bfloat16,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's notice that FSDP1 is deprecated
        return FullyShardedDataParallel(
            model,
            sharding_strategy=STRATEGY[options.parallel],
            device_mesh=meshes["replicas", "shard"] if hybrid else None,
            auto_wrap_policy=ModuleWrapPolicy({type(block) for block in model.blocks.values()}),
            mixed_precision=precision,
            device_id=world.device,
            use_orig_params=True,
            limit_all_gathers=True,
        )
