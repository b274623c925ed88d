"""Gradients of a model sharded with FSDP2 that uses a module twice. In: ranks.
Out: cases, readings of this rank.

A weight that is used twice gets two gradients. A layout that gathers it for each use, frees it in between and
reduces after each use can lose one of them. No size divides by the number of ranks. The reference is the
unsharded model in float64 on the data of all ranks.
"""

import copy
import functools
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from workloads.gates import Reading, relative_error
from workloads.ranks import CaseFunction, Ranks

try:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
except ImportError:  # before torch 2.6
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy, fully_shard

VOCAB, WIDTH, HIDDEN = 257, 66, 131
SAMPLES, LENGTH, MICROBATCHES = 2, 33, 2
STD = 0.1
# Of the norm of each weight's gradient. A use that is lost changes it by tenths, bfloat16 by 0.005.
LARGEST_ERROR = {"fp32": 1e-5, "bf16": 0.02}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How the model uses a weight twice, and how it is sharded."""

    tied: bool
    reshard: bool
    precision: str

    def __str__(self) -> str:
        """The problem as the name of a case."""
        twice = "tied weights and a block run twice" if self.tied else "a block run twice"
        return f"{twice}, {self.precision}{', resharded' if self.reshard else ''}"


class Block(nn.Module):  # type: ignore[misc]
    """x + down(gelu(up(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        out: torch.Tensor = x + self.down(functional.gelu(self.up(x)))
        return out


class Twice(nn.Module):  # type: ignore[misc]
    """An embedding, one block that runs twice, and a head, which may share the embedding's weights."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding, self.block = nn.Embedding(VOCAB, WIDTH), Block()
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy of the next token."""
        x = self.block(self.block(self.embedding(tokens[:, :-1])))
        logits = self.head(x).flatten(0, 1)
        wide = logits.float() if logits.dtype == torch.bfloat16 else logits
        return functional.cross_entropy(wide, tokens[:, 1:].flatten())


def cases(ranks: Ranks) -> Iterator[tuple[str, CaseFunction]]:
    """(name, function), in the same order on every rank."""
    for tied, reshard, precision in itertools.product((False, True), (True, False), LARGEST_ERROR):
        kind = Kind(tied=tied, reshard=reshard, precision=precision)
        yield str(kind), functools.partial(check, ranks, kind)


def check(ranks: Ranks, kind: Kind) -> Iterable[Reading]:
    """One reading for each weight."""
    model = Twice(tied=kind.tied)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random) * STD)
    exact = copy.deepcopy(model).double()
    for tokens in (one for rank in range(ranks.size) for one in batches(rank)):
        (exact(tokens) / (ranks.size * MICROBATCHES)).backward()
    expected = {name: weight.grad for name, weight in exact.named_parameters()}
    sharded = shard(model.to(ranks.device), ranks, kind)
    for number, tokens in enumerate(batches(ranks.rank), start=1):
        sharded.set_requires_gradient_sync(number == MICROBATCHES)
        (sharded(tokens.to(ranks.device)) / MICROBATCHES).backward()
    for name, weight in sharded.named_parameters():
        found, wanted = weight.grad, expected[name]
        assert wanted is not None
        error = float("inf") if found is None else relative_error(found.full_tensor().cpu(), wanted)
        yield Reading(f"gradient of {name}", error, LARGEST_ERROR[kind.precision])


def batches(rank: int) -> list[torch.Tensor]:
    """This rank's tokens, one tensor a microbatch."""
    random = torch.Generator().manual_seed(100 + rank)
    shape = (SAMPLES, LENGTH)
    return [torch.randint(VOCAB, shape, generator=random) for _ in range(MICROBATCHES)]


def shard(model: nn.Module, ranks: Ranks, kind: Kind) -> nn.Module:
    """FSDP2 on the block and on the root, which holds both ends: tied weights must be in one unit."""
    mesh = init_device_mesh(ranks.device.type, (ranks.size,))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if kind.precision == "bf16" else None, reduce_dtype=torch.float32
    )
    fully_shard(model.block, mesh=mesh, mp_policy=policy, reshard_after_forward=kind.reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=kind.reshard)
    return model
