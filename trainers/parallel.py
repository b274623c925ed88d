"""How ranks share a model. In: a skeleton and Options. Out: a Job that runs microbatches, steps, and knows
its state.

FSDP2 (with tensor parallel and HSDP meshes) is here; classic.py (FSDP1), pipeline.py and zero1.py hold the
other layouts. Order that torch demands: FP8, tensor parallel, compile, recompute around it, shard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import build
from errors import RefusedError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from options import Options
    from world import World


class Job(Protocol):
    """A model spread over ranks, with its optimizer."""

    data_rank: int
    data_size: int

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """Forward and backward of share·loss; gradients cross ranks with the last one. The loss, detached."""

    def step(self, lr: float) -> Tensor:
        """Clip, update, clear. The global gradient norm before clipping."""

    def state(self) -> dict[str, Any]:
        """What checkpoint.Checkpoints stores; loading fills it in place and then calls `restore`."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a loaded state."""

    def weights(self) -> dict[str, Tensor]:
        """All weights, whole, float32, on the CPU of every rank; in the model's order."""


def check(options: Options, world: World) -> None:
    """Refuse a number of ranks that the layout does not divide."""
    outer = options.pp * options.replicas * options.tp
    if world.size % outer:
        raise RefusedError(
            f"{world.size} ranks are no multiple of pp {options.pp} x replicas {options.replicas} "
            f"x tp {options.tp}"
        )


def mesh(options: Options, world: World) -> DeviceMesh:
    """Dimensions pp, replicas, shard, tp; torchrun numbers a node's ranks last, so tp stays inside a node."""
    outer = options.pp * options.replicas * options.tp
    sizes = (options.pp, options.replicas, world.size // outer, options.tp)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("pp", "replicas", "shard", "tp"))


def half(options: Options) -> bool:
    """Whether matrix products run below float32."""
    return options.precision != "fp32"


def prepare(model: nn.Module, options: Options, world: World, tp: DeviceMesh | None) -> None:
    """Give weights to every unit and apply what must come before sharding."""
    if options.precision.startswith("fp8"):
        build.fp8(model, options.precision)
    for name, unit in list(build.units(model)):
        build.materialise(model, unit, name, options, world.device)
    build.materialise(model, model, "", options, world.device)
    if tp is not None and tp.size() > 1:
        for block in model.blocks.values():
            parallelize_module(block, tp, tensor_plan(block))
    build.finish(model, options, gpu=world.gpu)


def tensor_plan(block: nn.Module) -> dict[str, Any]:
    """Split heads and hidden units by columns, then by rows; the sum comes back with one all-reduce each."""
    column = {
        name: ColwiseParallel()
        for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
    }
    rows = {name: RowwiseParallel() for name in ("attention.o", "mlp.down")}
    present = {name for name, _ in block.named_modules()}
    return {name: style for name, style in (column | rows).items() if name in present}


class Sharded:
    """FSDP2 over the shard (and replicas) dimension, beside tensor parallel on tp."""

    def __init__(self, model: nn.Module, options: Options, world: World) -> None:
        self.options, self.mesh = options, mesh(options, world)
        self.model = model
        prepare(model, options, world, self.mesh["tp"])
        shard(model, options, self.mesh)
        self.data_size = self.mesh["shard"].size() * self.mesh["replicas"].size()
        self.data_rank = self.mesh["replicas"].get_local_rank() * self.mesh["shard"].size()
        self.data_rank += self.mesh["shard"].get_local_rank()
        self.optimizer = adamw(model, options)

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """As Job."""
        self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last)
        loss = self.model(**batch)
        (loss * share).backward()
        return loss.detach()

    def step(self, lr: float) -> Tensor:
        """As Job."""
        norm = global_norm(self.model.parameters())
        scale_gradients(self.model.parameters(), norm, self.options.clip)
        update(self.optimizer, lr)
        if self.options.precision == "fp8":
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(self.model)
        return norm

    def state(self) -> dict[str, Any]:
        """As Job."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def restore(self, state: dict[str, Any]) -> None:
        """As Job."""
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def weights(self) -> dict[str, Tensor]:
        """As Job."""
        return {name: whole(value) for name, value in self.model.state_dict().items()}


def whole(value: Tensor) -> Tensor:
    """A tensor that may be spread over ranks, whole and on the CPU."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().float().cpu()


def shard(model: nn.Module, options: Options, meshes: DeviceMesh) -> None:
    """FSDP2 on each unit, then on the root; the last unit is used at once in backward and stays gathered."""
    where = meshes["replicas", "shard"] if options.replicas > 1 else meshes["shard"]
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if half(options) else None,
        reduce_dtype=torch.float32 if options.reduce == "fp32" else torch.bfloat16,
        cast_forward_inputs=False,  # embeddings are half already; the rotary table must stay float32
    )
    for name, unit in list(build.units(model)):
        stays = name == "head" or not options.reshard
        fully_shard(unit, mesh=where, mp_policy=policy, reshard_after_forward=not stays)
    fully_shard(model, mesh=where, mp_policy=policy)


def adamw(model: nn.Module, options: Options) -> torch.optim.AdamW:
    """AdamW as in LLM Foundry and Llama: betas .9 and .95, no decay. Parameters are grouped by their mesh."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        key = parameter.device_mesh if isinstance(parameter, DTensor) else None
        groups.setdefault(key, []).append(parameter)
    lists = [{"params": parameters} for parameters in groups.values()]
    return torch.optim.AdamW(
        lists, lr=options.lr or 0.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, fused=True
    )


def update(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One optimizer step at this learning rate; gradients are freed."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad()


def global_norm(parameters: Any, extra: dist.ProcessGroup | None = None) -> Tensor:
    """Euclidean norm over all gradients of all ranks: local squares, summed over the dimensions that shard
    them.
    """
    sums: dict[tuple, list[Tensor]] = {}
    for gradient in (p.grad for p in parameters if p.grad is not None):
        local, groups = gradient, ()
        if isinstance(gradient, DTensor):
            local, dims = gradient.to_local(), enumerate(gradient.placements)
            groups = tuple(gradient.device_mesh.get_group(i) for i, place in dims if not place.is_replicate())
        sums.setdefault(groups, []).append(local)
    total = 0.0
    for groups, gradients in sums.items():
        square = torch.stack(torch._foreach_norm(gradients, 2, dtype=torch.float32)).square().sum()  # noqa: SLF001
        for group in groups:
            dist.all_reduce(square, group=group)
        total = total + square
    if extra is not None:
        dist.all_reduce(total, group=extra)
    return total.sqrt()


def scale_gradients(parameters: Any, norm: Tensor, limit: float) -> None:
    """Scale by limit/norm where the norm is larger. A NaN norm makes every weight NaN."""
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    gradients = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    torch._foreach_mul_(gradients, scale)
