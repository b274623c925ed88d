"""A tied embedding in a pipeline: one weight, with a copy on the first stage and one on the last.

In: a stage, the mesh. Out: the group of the two ranks that hold the same part of it. In each step the two
gradients become their sum. Both copies begin with the same values and take the same steps, so they stay one
weight, as in Megatron-LM (arXiv 2104.04473). The norm of the gradients counts the first copy alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from models.layers import BlockModel

FIRST, LAST = "embedding.weight", "head.out.weight"  # the copies
BOTH = 2  # stages that hold one


class Tie:
    """The tie as this rank sees it. `name`: of the copy that it holds; None on a stage between.

    All ranks make it together, because all of them must take part when torch makes a group. Two stages have
    that group already: it is the pipeline's.
    """

    def __init__(self, model: BlockModel, mesh: DeviceMesh) -> None:
        held = {name for name, _ in model.named_parameters()}
        self.name = next((name for name in (FIRST, LAST) if name in held), None)
        self.group = mesh["pp"].get_group()
        if mesh["pp"].size() > BOTH:
            first, last = (mesh.mesh[stage].flatten().tolist() for stage in (0, -1))
            for pair in zip(first, last, strict=True):
                group = dist.new_group(list(pair))
                self.group = group if dist.get_rank() in pair else self.group

    def sum(self, gradient: Tensor) -> None:
        """The gradients of both copies become their sum."""
        dist.all_reduce(gradient, group=self.group)
