"""FSDP2 and DTensor, from where the installed torch has them. In: torch 2.4 or newer. Out: their names.

torch 2.6 made FSDP2 public (https://github.com/pytorch/pytorch/pull/141868), torch 2.5 DTensor
(https://github.com/pytorch/pytorch/pull/133881). cuda12.1-torch2.4.1 has both under their earlier names.
"""

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard
try:
    from torch.distributed.tensor import DTensor, Replicate, Shard
except ImportError:  # before torch 2.5
    from torch.distributed._tensor import DTensor, Replicate, Shard

__all__ = ["DTensor", "MixedPrecisionPolicy", "Replicate", "Shard", "fully_shard"]
