"""FSDP1 by the founding documents' names: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD.

In: a skeleton and Options. Out: a Job. torch calls it deprecated; LLM Foundry and AMD ran it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import parallel

if TYPE_CHECKING:
    from torch import Tensor, nn

    from options import Options
    from world import World

STRATEGY = {
    "full_shard": ShardingStrategy.FULL_SHARD,
    "shard_grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "no_shard": ShardingStrategy.NO_SHARD,
    "hybrid_shard": ShardingStrategy.HYBRID_SHARD,
}


class Classic(parallel.Sharded):
    """FSDP1, as LLM Foundry and AMD ran it: FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        self.options, self.mesh = options, parallel.mesh(options, world)
        parallel.prepare(model, options, world, None)
        self.data_rank, self.data_size = world.rank, world.size
        kind = torch.bfloat16 if parallel.half(options) else torch.float32
        reduce = torch.float32 if options.reduce == "fp32" else torch.bfloat16
        hybrid = options.parallel == "hybrid_shard"
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # torch calls FSDP1 deprecated; the documents ran it
            self.model = FullyShardedDataParallel(
                model,
                sharding_strategy=STRATEGY[options.parallel],
                device_mesh=self.mesh["replicas", "shard"] if hybrid else None,
                auto_wrap_policy=ModuleWrapPolicy({type(b) for b in model.blocks.values()}),
                mixed_precision=MixedPrecision(param_dtype=kind, reduce_dtype=reduce),
                device_id=world.device,
                use_orig_params=True,
                limit_all_gathers=True,
            )
        self.optimizer = parallel.adamw(self.model, options)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job."""
        if last:
            return self._run(batch, share)
        with self.model.no_sync():
            return self._run(batch, share)

    def _run(self, batch: dict[str, Tensor], share: float) -> Tensor:
        loss = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """As Job."""
        norm = self.model.clip_grad_norm_(self.options.clip)
        parallel.update(self.optimizer, lr)
        return norm

    def weights(self) -> dict[str, Tensor]:
        """As Job."""
        full = get_model_state_dict(
            self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=False)
        )
        return {name: parallel.whole(value) for name, value in full.items()}
