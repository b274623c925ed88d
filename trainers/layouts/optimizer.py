"""AdamW, the global gradient norm and clipping over parameters that may be spread over ranks.

In: parameters, plain or DTensor. Out: an optimizer, a norm, updated weights. ZeRO-1 has an optimizer of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from layouts.sharding import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from options import Options


def adamw(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW as in LLM Foundry and Llama: betas 0.9 and 0.95, no weight decay. One group of
    parameters a mesh.
    """
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    lists = [{"params": parameters} for parameters in groups.values()]
    return torch.optim.AdamW(
        lists, lr=options.lr or 0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments that this rank holds."""
    held = (value for moments in optimizer.state.values() for value in moments.values())
    return sum(_local(value).nbytes for value in held)


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One optimizer step at this learning rate; gradients are freed."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def global_norm(parameters: Iterable[Tensor], extra: dist.ProcessGroup | None = None) -> Tensor:
    """Euclidean norm over all gradients of all ranks.

    Each rank squares and sums what it holds; the sums are reduced over the mesh dimensions that shard them,
    and over `extra` (the pipeline's stages).
    """
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(gradient, DTensor):
            dims = enumerate(gradient.placements)
            groups = tuple(gradient.device_mesh.get_group(i) for i, place in dims if not place.is_replicate())
        by_groups.setdefault(groups, []).append(_local(gradient))
    squares = []
    for groups, gradients in by_groups.items():
        square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()  # noqa: SLF001
        for group in groups:
            dist.all_reduce(square, group=group)
        squares.append(square)
    total = torch.stack(squares).sum()
    if extra is not None:
        dist.all_reduce(total, group=extra)
    return total.sqrt()


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor, limit: float) -> None:
    """Scale all gradients by limit/norm where the norm is larger than the limit. A NaN norm
    makes them NaN.
    """
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([_local(p.grad) for p in parameters if p.grad is not None], scale)


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
