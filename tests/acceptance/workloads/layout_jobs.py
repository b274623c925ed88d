"""A small model in a layout of torch itself, trained by AdamW. In: a case. Out: losses, gradients, state.

Layouts are DDP (with ZeroRedundancyOptimizer too), FSDP1, FSDP2, tensor parallel, the last two together, a
pipeline (layout_pipelines.py), also of FSDP2, and one rank alone on all data. What each can be asked for is
in layout_options.py.
"""

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from workloads.compiled_models import BACKEND
from workloads.layout_models import BETAS, LR, TYPES, Block, Case, Layout, Model, Tensors, chunks_of, loss_of
from workloads.layout_models import syncs as syncs_after
from workloads.layout_options import DDP_ONLY, FSDP1_ONLY, compiled_whole, groups_of
from workloads.ranks import Ranks

try:
    from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import (
        CPUOffloadPolicy,
        FSDPModule,
        MixedPrecisionPolicy,
        fully_shard,
    )

Of = Callable[[nn.Parameter], Any]
PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "module.")


@dataclass(frozen=True)
class Step:
    """One step of a job: losses of this rank, gradients before they were clipped, and their norm."""

    losses: torch.Tensor
    gradients: Tensors
    norm: float | None


class Job:
    """A model in a layout with its AdamW; also what torch.distributed.checkpoint saves and loads."""

    def __init__(self, case: Case, layout: Layout, ranks: Ranks, seed: int, epsilon: float) -> None:
        self.case, self.layout, self.ranks, self.epsilon, self.seed = case, layout, ranks, epsilon, seed
        self.model: Any = Model(case, seed).to(ranks.device)
        self.model.recomputed = layout.memory == "recomputed"
        self.trained = [name for name, weight in self.model.named_parameters() if weight.requires_grad]
        self.groups, self.ran = groups_of(layout, ranks.size), False
        self.group = ranks.rank * self.groups // ranks.size
        sums = layout["force_sum"] or ranks.device.type == "cuda"  # gloo has no sum of what is divided
        self.divided = layout["divided"] if sums else ""
        self.fsdp1, self.fsdp2 = layout.parallel == "fsdp1", "fsdp2" in layout.parallel
        self.autocast = case.kind == "bfloat16" and not (self.fsdp1 or self.fsdp2)
        self._spread(layout)
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        how: dict[str, Any] = {"foreach": case.adamw == "foreach", "fused": case.adamw == "fused"}
        how |= {"lr": LR, "betas": BETAS, "weight_decay": 0.0, "eps": epsilon}
        if layout["zero"]:
            how |= {"parameters_as_bucket_view": layout["zero"] == "views"}
            self.optimizer: Any = ZeroRedundancyOptimizer(trained, torch.optim.AdamW, **how)
        else:
            self.optimizer = torch.optim.AdamW(trained, **how) if trained else None

    def _spread(self, layout: Layout) -> None:
        kind, parallel = self.ranks.device.type, layout.parallel
        inner = layout["inner"] or self.ranks.size
        data = mesh(kind, self.ranks.size // inner, inner)
        if "tensor" in parallel:
            plan = tensor_plan(self.case, layout["sequence"])
            parallelize_module(self.model, data["inner"], plan)
        around = compiled_whole(layout)
        torch._dynamo.config.optimize_ddp = around  # its own buckets begin with one of 1 MiB
        compiled, backend = layout.memory == "compiled", "eager" if "tensor" in parallel else BACKEND[kind]
        for block in self.model.blocks if compiled and not around else ():
            block.compile(backend=backend)
        if parallel == "ddp":
            self._ddp(layout)
            self.model = torch.compile(self.model, backend=backend) if compiled and around else self.model
        elif self.fsdp1:
            self._fsdp1(layout, data)
        elif self.fsdp2:
            over = data if layout["replicas"] else data["outer" if "tensor" in parallel else "inner"]
            self._fsdp2(self.model, layout, over)

    def _ddp(self, layout: Layout) -> None:
        asked = given(DistributedDataParallel, layout, DDP_ONLY)
        if "forward_sync_buffers" not in asked:  # before torch 2.13
            asked["broadcast_buffers"] = layout["forward_sync_buffers"]
        self.model = DistributedDataParallel(self.model, **asked)
        if layout["reduce"] == "float16":
            self.model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif layout["hook"]:
            self.model.register_comm_hook(None, default_hooks.allreduce_hook)

    def _fsdp1(self, layout: Layout, data: DeviceMesh) -> None:
        kind, named = TYPES[self.case.kind], layout["backward_prefetch"]
        synced = layout["sync_module_states"] and self.ranks.device.type == "cuda"  # refused for others
        policies: dict[str, Any] = {
            "blocks": ModuleWrapPolicy({Block}),
            "size": functools.partial(size_based_auto_wrap_policy, min_num_params=2000),
        }
        self.model = Fsdp1(
            self.model,
            device_mesh=data if "HYBRID" in layout["strategy"] else data["inner"],
            sharding_strategy=ShardingStrategy[layout["strategy"]],
            auto_wrap_policy=policies.get(layout["units"]),
            backward_prefetch=BackwardPrefetch[named] if named else None,
            mixed_precision=MixedPrecision(
                param_dtype=None if kind == torch.float32 else kind, reduce_dtype=TYPES[layout["reduce"]]
            ),
            ignored_states=self._ignored(layout),
            cpu_offload=CPUOffload(offload_params=layout["offload"] and self.ranks.device.type == "cuda"),
            device_id=self.ranks.device,
            **given(Fsdp1, layout, FSDP1_ONLY) | {"sync_module_states": synced},
        )

    def _fsdp2(self, model: Any, layout: Layout, over: DeviceMesh) -> None:
        kind, size = TYPES[self.case.kind], over.size(-1)
        policy = MixedPrecisionPolicy(
            param_dtype=None if kind == torch.float32 else kind,
            reduce_dtype=TYPES[layout["reduce"]],
            output_dtype=TYPES.get(layout["output"]),
            cast_forward_inputs=layout["cast_forward_inputs"] is not False,
        )
        more: dict[str, Any] = {"mp_policy": policy, "reshard_after_forward": layout["reshard_after_forward"]}
        if layout["ignored"]:
            more["ignored_params"] = set(self._ignored(layout) or ())
        if layout["offload"]:
            pinned = layout["offload"] == "pinned" and self.ranks.device.type == "cuda"  # refused for others
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=pinned)
        if layout["placement"]:
            more["shard_placement_fn"] = lambda one: (
                Shard(1) if one.ndim > 1 and one.shape[1] % size == 0 else None
            )
        blocks = [one for one in model.blocks if one is not None and layout["units"] == "blocks"]
        for unit in (*blocks, model):
            fully_shard(unit, mesh=over, **more)
        if layout["prefetch"]:
            for one, after in itertools.pairwise(blocks):
                one.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([one])
        factor = {"by ranks": float(self.groups), "by caller": 1.0}.get(self.divided)
        asked = {
            "set_gradient_divide_factor": factor,
            "set_reduce_scatter_max_input_buffers": layout["in_flight"],
        }
        asked |= {method: layout[option] for option, method in FSDP2_METHODS.items()}
        for method, value in asked.items():
            for unit in (*blocks, model) if value else ():
                getattr(unit, method, lambda _: None)(value)

    def _ignored(self, layout: Layout) -> list[nn.Parameter] | None:
        return (
            [one for one in self.model.parameters() if not one.requires_grad] if layout["ignored"] else None
        )

    def step(self, number: int, most: float) -> Step:
        """One step of AdamW: this rank's losses, and each gradient, whole, as it is before it is clipped."""
        self.optimizer.zero_grad()
        losses, every = [], list(enumerate(chunks_of(self.case, number)))[self.group :: self.groups]
        for turn, (chunk, tokens) in enumerate(every):
            sync = syncs_after(self.now(), turn, len(every))
            with (
                self._syncing(sync, turn + 1 == len(every)),
                torch.autocast(self.ranks.device.type, torch.bfloat16, self.autocast),
            ):
                if self.layout["ahead"]:
                    self.model.unshard()
                loss = loss_of(self.model, tokens.to(self.ranks.device), self.case.uses(number, chunk))
                (loss / len(every)).backward()
            losses.append(loss.detach().double().cpu())
        for _, weight in self.named() if self.divided == "by caller" else ():
            if weight.grad is not None:
                weight.grad.div_(self.groups)
        found = self.whole(lambda weight: weight.grad)
        norm = self._clip(most) if self.case.clip else None
        self.optimizer.step()
        self.ran = True
        return Step(torch.stack(losses), {name: found[name] for name in self.trained}, norm)

    def now(self) -> Layout:
        """The layout as the next step has it."""
        if self.layout["sync"] != "later":
            return self.layout
        sync = "last" if self.ran else "each"
        return replace(self.layout, options={**self.layout.options, "sync": sync})

    def _clip(self, most: float) -> float:
        if self.fsdp1:
            return float(self.model.clip_grad_norm_(most))
        weights = list(self.model.parameters())
        if self.layout["offload"]:  # no sum over ranks of what is on the host, where NCCL is the backend
            norm = on_device(
                torch.nn.utils.get_total_norm([one.grad for one in weights if one.grad is not None])
            )
            torch.nn.utils.clip_grads_with_norm_(weights, most, norm.cpu())
            return float(norm)
        return float(on_device(torch.nn.utils.clip_grad_norm_(weights, most)))

    def _syncing(self, sync: bool, last: bool) -> Any:
        if self.fsdp2:
            self.model.set_reshard_after_backward(last or self.layout["reshard_after_backward"])
            if self.layout["sync"] == "scatter":
                self.model.set_requires_all_reduce(sync)
            else:
                self.model.set_requires_gradient_sync(sync)
        inner = getattr(self.model, "_orig_mod", self.model)
        return inner.no_sync() if hasattr(inner, "no_sync") and not sync else contextlib.nullcontext()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights by their names in a plain model."""
        return ((plain_name(name), weight) for name, weight in self.model.named_parameters())

    def buffers(self) -> Tensors:
        """A copy of every buffer."""
        return {plain_name(name): one.detach().cpu().clone() for name, one in self.model.named_buffers()}

    def whole(self, of: Of) -> Tensors:
        """What belongs to each weight, from all ranks; zeros where there is nothing.

        FSDP1 gathers nothing but weights: for as long as it does, its shards have the numbers asked for.
        """
        if not self.fsdp1:
            return {name: gathered(of(weight), weight) for name, weight in self.named()}
        shards = list(self.model.parameters())
        kept, values = [one.detach().clone() for one in shards], [of(one) for one in shards]
        with torch.no_grad():
            for shard, value in zip(shards, values, strict=True):
                shard.data.copy_(torch.zeros_like(shard) if value is None else value)
            with Fsdp1.summon_full_params(self.model, writeback=False):
                found = {name: one.detach().cpu().clone() for name, one in self.named()}
            for shard, value in zip(self.model.parameters(), kept, strict=True):
                shard.data.copy_(value)
        return found

    def weights(self) -> Tensors:
        """A copy of every weight, whole."""
        return self.whole(lambda weight: weight)

    def state(self) -> Tensors:
        """A copy of every weight and buffer, and of what AdamW knows about each weight, whole."""
        found = self.weights() | {f"buffer {name}": one for name, one in self.buffers().items()}
        known = self.optimizer.state
        for key in ("step", "exp_avg", "exp_avg_sq") if known else ():
            some = self.whole(functools.partial(_known, known, key))
            found |= {
                f"{key} of {name}": one.flatten()[0] if key == "step" else one for name, one in some.items()
            }
        return found

    def state_dict(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what torch.distributed.checkpoint loaded."""
        taken = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **taken)


FSDP2_METHODS = {
    "force_sum": "set_force_sum_reduction_for_comms",
    "unused": "set_reduce_scatter_unused_params",
}
HAS_UNUSED = hasattr(FSDPModule, FSDP2_METHODS["unused"])  # since torch 2.13


@functools.cache
def mesh(kind: str, outer: int, inner: int) -> DeviceMesh:
    """All ranks in two dimensions, made once."""
    return init_device_mesh(kind, (outer, inner), mesh_dim_names=("outer", "inner"))


def given(function: Any, layout: Layout, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that this release knows, and that are not left out."""
    known = inspect.signature(function).parameters
    return {name: layout[name] for name in options if name in known and layout[name] is not None}


def _known(state: Any, key: str, weight: nn.Parameter) -> Any:
    return state.get(weight, {}).get(key)


def plain_name(name: str) -> str:
    """The name of a weight without what wrappers put before it."""
    for prefix in PREFIXES:
        name = name.replace(prefix, "")
    return name


def tensor_plan(case: Case, sequence: bool) -> dict[str, Any]:
    """Split embedding, head and blocks; between them the sequence is split too, or whole everywhere."""
    between = Shard(1) if sequence else Replicate()
    ends = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ends,
        **({"spare": ends} if case["spare"] else {}),
    }
    return plan | ({"norm": SequenceParallel(), "blocks.*.norm": SequenceParallel()} if sequence else {})


def gathered(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor from all ranks; zeros in place of `None`."""
    value = torch.zeros_like(like) if value is None else value.detach()
    return on_device(value).cpu().clone()


def on_device(value: torch.Tensor) -> torch.Tensor:
    """A tensor from all ranks, on the device of their mesh, where the host has it."""
    if not hasattr(value, "full_tensor"):
        return value
    found: torch.Tensor = value.to(value.device_mesh.device_type).full_tensor()
    return found
