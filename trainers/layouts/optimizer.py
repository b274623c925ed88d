"""AdamW, the global gradient norm and clipping over parameters that may be spread over ranks.

In: parameters, plain or DTensor. Out: an optimizer, a norm, updated weights. ZeRO-1 has an optimizer of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from layouts.flat import local
from layouts.sharding import DTensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from options import Options


def matrices(model: nn.Module) -> set[str]:
    """The names of what decays: no norms and biases. FSDP1 makes all of them flat: ask before it does."""
    return {name for name, weight in model.named_parameters() if weight.ndim > 1}


def adamw(model: nn.Module, options: Options, decays: set[str]) -> torch.optim.AdamW:
    """AdamW as in LLM Foundry and Llama: betas 0.9 and 0.95.

    Groups of parameters: one a mesh, and with --weight-decay one of what decays (`decays`) and one of the
    rest.
    """
    groups: dict[tuple[object, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            decay = options.weight_decay if name.replace("_fsdp_wrapped_module.", "") in decays else 0.0
            groups.setdefault((mesh, decay), []).append(parameter)
    lists = [{"params": weights, "weight_decay": decay} for (_, decay), weights in groups.items()]
    return torch.optim.AdamW(lists, lr=options.lr or 0.0, betas=(0.9, 0.95), eps=1e-8, fused=True)


def fill_gradients(model: nn.Module) -> None:
    """Zero for each weight that is not used, so that it has moments and a checkpoint has them."""
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def skips(norm: torch.Tensor, options: Options) -> bool:
    """Whether this step changes no weight; the norm is that of all ranks, so all of them skip."""
    return options.not_finite == "skip" and not bool(norm.isfinite())


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the moments that this rank holds."""
    held = (value for moments in optimizer.state.values() for value in moments.values())
    return sum(local(value).nbytes for value in held)


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
        by_groups.setdefault(groups, []).append(local(gradient))
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
    """Scale all gradients by limit/norm where the norm is larger than the limit.

    A NaN norm makes them NaN.
    """
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(p.grad) for p in parameters if p.grad is not None], scale)
