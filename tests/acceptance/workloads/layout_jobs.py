"""A small model in a layout of torch itself, trained by AdamW. In: a case. Out: losses, gradients, state.

Layouts are DDP, FSDP2, tensor parallel, the last two together, and one rank alone on all data.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from workloads.compiled_models import BACKEND
from workloads.ranks import Ranks

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

Tensors = dict[str, torch.Tensor]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR = 0.01


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the weights and their gradients are, and what is kept between forward and backward."""

    parallel: str
    memory: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """The layout with its options."""
        return " ".join([self.parallel, self.memory, *(f"{k}={v}" for k, v in self.options.items())])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, what is trained, its type, and the layouts of the first and of the second step."""

    numbers: int
    sizes: Mapping[str, int]
    kind: str
    chunks: int
    frozen: bool
    spare: bool
    layouts: tuple[Layout, ...]
    late: bool
    adamw: str

    def __str__(self) -> str:
        """The case in words."""
        more = [word for word in ("frozen", "spare", "late") if getattr(self, word)]
        sizes = "x".join(map(str, self.sizes.values()))
        layouts = " to ".join(map(str, self.layouts))
        return " ".join([self.kind, sizes, f"{self.chunks} chunks", self.adamw, *more, layouts])


class Block(nn.Module):  # type: ignore[misc]
    """x + down(gelu(up(norm(x))))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, hidden),
            nn.Linear(hidden, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        out: torch.Tensor = x + self.down(functional.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):  # type: ignore[misc]
    """An embedding, blocks, a norm and a head; `spare` has an output that no loss reads."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        width, vocab = case.sizes["width"], case.sizes["vocab"]
        self.embedding, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, case.sizes["hidden"]) for _ in range(case.sizes["blocks"]))
        self.head = nn.Linear(width, vocab, bias=False)
        self.spare = nn.Linear(width, vocab) if case.spare else None
        self.recomputed = False
        numbers = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            scale = torch.full_like(weight, 1.0 if "norm.weight" in name else 0.0)
            weight.data = scale + 0.1 * torch.randn(weight.shape, generator=numbers)
        self.embedding.weight.requires_grad_(not case.frozen)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits, and the output that is never used."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputed else block(x)
        x = self.norm(x)
        return self.head(x), self.spare(x) if self.spare is not None else None


class Job:
    """A model in a layout with its AdamW; also what torch.distributed.checkpoint saves and loads."""

    def __init__(self, case: Case, layout: Layout, ranks: Ranks, seed: int, **of: Any) -> None:
        """With a type as `cast`, all is computed in it. `epsilon` is AdamW's; the first step chooses it."""
        self.case, self.layout, self.ranks = case, layout, ranks
        self.epsilon, self.cast = of.get("epsilon", 0.0), of.get("cast")
        self.model: Any = Model(case, seed).to(ranks.device)
        self.model.recomputed = layout.memory == "recomputed"
        self.groups, self.group, self.autocast = 1, 0, self.cast is None and case.kind == "bfloat16"
        self.ran = False
        self._spread()
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        how = case.adamw
        self.optimizer = torch.optim.AdamW(
            trained, lr=LR, weight_decay=0.0, foreach=how == "foreach", fused=how == "fused"
        )

    def _spread(self) -> None:
        parallel, options = self.layout.parallel, self.layout.options
        size, kind = self.ranks.size, self.ranks.device.type
        inner = options.get("inner", size)
        data = init_device_mesh(kind, (size // inner, inner), mesh_dim_names=("outer", "inner"))
        if "tensor" in parallel:
            self.groups, self.group = size // inner, self.ranks.rank // inner
            parallelize_module(self.model, data["inner"], tensor_plan(self.case, options["sequence"]))
        elif parallel != "alone":
            self.groups, self.group = size, self.ranks.rank
        around = options.get("bucket_cap_mb", 0) >= 1
        torch._dynamo.config.optimize_ddp = around  # its own buckets begin with one of 1 MiB
        backend = "eager" if "tensor" in parallel else BACKEND[kind]
        if self.layout.memory == "compiled" and not around:
            for block in self.model.blocks:
                block.compile(backend=backend)
        if parallel == "ddp":
            names = ("bucket_cap_mb", "gradient_as_bucket_view", "static_graph", "find_unused_parameters")
            self.model = DistributedDataParallel(self.model, **{name: options[name] for name in names})
            if self.layout.memory == "compiled" and around:
                self.model = torch.compile(self.model, backend=backend)
        if "fsdp2" in parallel:
            self.autocast = False
            mesh = data["outer"] if "tensor" in parallel else data if options["replicas"] else data["inner"]
            policy = MixedPrecisionPolicy(param_dtype=TYPES[self.case.kind], reduce_dtype=torch.float32)
            more = {"mp_policy": policy, "reshard_after_forward": options["reshard_after_forward"]}
            for block in self.model.blocks if options["units"] == "blocks" else ():
                fully_shard(block, mesh=mesh, **more)
            fully_shard(self.model, mesh=mesh, **more)

    def step(self, number: int) -> tuple[torch.Tensor, Tensors]:
        """One step of AdamW: this rank's losses, and each gradient, whole, as AdamW gets it."""
        self.optimizer.zero_grad()
        chunks, losses = chunks_of(self.case, number)[self.group :: self.groups], []
        summing = ("each",) if self.ran else ("each", "each at first")
        self.ran = True
        for n, tokens in enumerate(chunks):
            sync = n + 1 == len(chunks) or self.layout.options["sync"] in summing
            with self._syncing(sync), torch.autocast(self.ranks.device.type, torch.bfloat16, self.autocast):
                loss = loss_of(self._call, tokens.to(self.ranks.device))
                (loss / len(chunks)).backward()
            losses.append(loss.detach())
        found = {name: whole(weight.grad, weight) for name, weight in self.named() if weight.requires_grad}
        if not self.epsilon:
            self.epsilon = float(torch.cat([one.flatten() for one in found.values()]).square().mean().sqrt())
        self.optimizer.param_groups[0]["eps"] = self.epsilon
        self.optimizer.step()
        return torch.stack(losses).cpu(), found

    def _call(self, tokens: torch.Tensor) -> Any:
        if self.cast is None:
            return self.model(tokens)
        weights = {name: one.to(self.cast) for name, one in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, tokens)

    def _syncing(self, sync: bool) -> Any:
        if "fsdp2" in self.layout.parallel:
            self.model.set_requires_gradient_sync(sync)
        ddp = self.layout.parallel == "ddp" and not sync
        return getattr(self.model, "_orig_mod", self.model).no_sync() if ddp else contextlib.nullcontext()

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights by their names in a plain model."""
        for name, weight in self.model.named_parameters():
            yield name.replace("_orig_mod.", "").removeprefix("module."), weight

    def weights(self) -> Tensors:
        """A copy of every weight that is trained, whole."""
        return {name: whole(weight, weight) for name, weight in self.named() if weight.requires_grad}

    def state(self) -> Tensors:
        """A copy of every weight, and of what AdamW knows about it, whole."""
        found = {name: whole(weight, weight) for name, weight in self.named()}
        for name, weight in self.named():
            known = self.optimizer.state.get(weight, {})
            found |= {f"{key} of {name}": whole(value, value) for key, value in known.items()}
        return found

    def state_dict(self) -> dict[str, Any]:
        """What torch.distributed.checkpoint saves."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what torch.distributed.checkpoint loaded."""
        taken = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **taken)


def tensor_plan(case: Case, sequence: bool) -> dict[str, Any]:
    """Split embedding, head and blocks; between them the sequence is split too, or whole everywhere."""
    between = Shard(1) if sequence else Replicate()
    ends = ColwiseParallel(input_layouts=between, output_layouts=Replicate())
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "blocks.*.up": ColwiseParallel(input_layouts=between),
        "blocks.*.down": RowwiseParallel(output_layouts=between),
        "head": ends,
        **({"spare": ends} if case.spare else {}),
    }
    return plan | ({"norm": SequenceParallel(), "blocks.*.norm": SequenceParallel()} if sequence else {})


def chunks_of(case: Case, step: int) -> list[torch.Tensor]:
    """The tokens of one step, in one chunk for each of the backward passes of one rank alone."""
    numbers = torch.Generator().manual_seed(case.numbers % 2**31 + 7919 * step)
    shape = (case.sizes["batch"], case.sizes["length"] + 1)
    return [torch.randint(case.sizes["vocab"], shape, generator=numbers) for _ in range(case.chunks)]


def loss_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy of the next token."""
    logits = model(tokens[:, :-1])[0].flatten(0, 1)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide, tokens[:, 1:].flatten())


def whole(value: Any, like: torch.Tensor) -> torch.Tensor:
    """A copy of a tensor from all ranks; zeros where there is no gradient."""
    value = torch.zeros_like(like) if value is None else value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).cpu().clone()
