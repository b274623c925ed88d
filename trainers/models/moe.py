"""Sparse decoders: Llama's layer with a router and experts for the MLP.

The models are Mixtral (arXiv 2401.04088) and one like ZAYA1.

In: tokens and labels. Out: mean cross entropy plus the balance loss. Tokens are sorted by expert, and one
grouped product serves all experts: the host never waits to learn how many tokens each expert got.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from models import llama

if TYPE_CHECKING:
    from torch import Tensor


BYTES = 256  # experts whose numbers fit a byte


@dataclass(frozen=True, kw_only=True)
class Config(llama.Config):
    """Llama's shape; `ffn` is an expert's.

    `balance`: weight of the balance loss. `lean`: tokens come in order, and back, by gathers alone.
    """

    experts: int
    active_experts: int
    balance: float = 0.01
    renormalise: bool = True  # Mixtral: the chosen experts' weights sum to one
    lean: bool = False


class Experts(nn.Module):
    """Router and SwiGLU experts.

    `load`: each expert's share of the last tokens x number of experts; 1 is even.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.router = nn.Linear(config.width, config.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(config.experts, 2 * config.ffn, config.width))
        self.down = nn.Parameter(torch.empty(config.experts, config.width, config.ffn))
        self.load: Tensor | None = None
        self.penalty: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Weighted sum of each token's chosen experts."""
        rows, config = x.flatten(0, 1), self.config
        chance = F.softmax(self.router(rows).float(), -1)
        weight, chosen = chance.topk(config.active_experts, -1)
        if config.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        if config.lean:
            order, back_to = orders(chosen, config.experts)
        else:
            order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen, config.experts).sum((0, 1))
        self.load = counts.detach() * config.experts / chosen.numel()
        self.penalty = (self.load * chance.mean(0)).sum()
        if config.lean:
            copies = rows[:, None].expand(-1, config.active_experts, -1).flatten(0, 1)
            sent, scale = permuted(copies, order, back_to), permuted(weight.flatten(), order, back_to)
        else:
            sent, scale = rows[order // config.active_experts], weight.flatten()[order]
        gate, up = grouped(sent, self.gate_up, counts).chunk(2, -1)
        back = grouped(F.silu(gate) * up, self.down, counts) * scale[:, None].to(x.dtype)
        if config.lean:
            shares = permuted(back, back_to, order).unflatten(0, (-1, config.active_experts))
            return shares.sum(1).view_as(x)
        return torch.zeros_like(rows).index_add_(0, order // config.active_experts, back).view_as(x)


class _Permuted(torch.autograd.Function):
    """Rows in another order.

    An inverse order makes backward a gather too: torch's own backward of an index adds rows up, which needs
    atomics or a sort on a GPU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def permuted(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Rows x[order]; `inverse` is the inverse permutation of `order`."""
    found: Tensor = _Permuted.apply(x, order, inverse)
    return found


def orders(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order that sorts choices by expert, and its inverse. A GPU sorts bytes in 1 pass, longs in 8."""
    kind = torch.uint8 if experts <= BYTES else torch.int32
    order = chosen.flatten().to(kind).argsort(stable=True)
    place = torch.arange(order.numel(), device=order.device)
    return order, torch.zeros_like(order).scatter(0, order, place)


def grouped(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Rows of x [tokens, in], sorted by expert, times each expert's weight [experts, out, in]."""
    if x.is_cuda and x.dtype == torch.bfloat16:
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).int())  # noqa: SLF001
    parts = zip(x.split(counts.tolist()), weight, strict=True)
    return torch.cat([rows @ expert.t() for rows, expert in parts])


class Model(llama.Model):
    """Llama's decoder with experts."""

    whole_graph = False  # the CPU path reads the experts' loads on the host

    def block(self) -> nn.Module:
        """One sparse layer."""
        return llama.Block(self.config, Experts(self.config))

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy plus the mean balance loss of the layers (arXiv 2101.03961)."""
        loss = super().forward(tokens, labels, documents)
        penalties = [block.mlp.penalty for block in self.blocks.values()]
        return loss + self.config.balance * torch.stack(penalties).mean() if self.head else loss

    def statistics(self) -> dict[str, float]:
        """The largest load of an expert in any layer; 1 is even."""
        return {"router_load_max": max(float(b.mlp.load.max()) for b in self.blocks.values())}


SPARSE = {"mlp.router": "mlp.gate"}


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our weights under the names of transformers' MixtralForCausalLM (version 5: experts in one tensor)."""
    return {_theirs(name): value for name, value in state.items()}


def _theirs(name: str) -> str:
    if name.endswith(("mlp.gate_up", "mlp.down")):
        layer = name.split(".")[1]
        return f"model.layers.{layer}.mlp.experts.{name.rsplit('.', 1)[1]}_proj"
    return llama.rename(name, llama.NAMES | SPARSE)


def from_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Inverse of to_transformers; also of what the library saves: a tensor for each expert and product."""
    back = {theirs: ours for ours, theirs in (llama.NAMES | SPARSE).items() if ours != "mlp.gate"}
    found = {}
    for name, value in _joined(state).items():
        if ".mlp.experts." in name:
            layer, part = name.split(".")[2], name.rsplit(".", 1)[1].removesuffix("_proj")
            found[f"blocks.{layer}.mlp.{part}"] = value
        else:
            found[llama.rename(name, back)] = value
    return found


def _joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of version 5: w1 (gate), w3 (up) and w2 (down) of all experts in two tensors of a layer."""
    found, apart = {}, ".block_sparse_moe."
    for name, value in state.items():
        layer, _, rest = name.partition(apart)
        if rest == "gate.weight":
            found[f"{layer}.mlp.gate.weight"] = value
        elif rest == "experts.0.w1.weight":
            count = sum(x.startswith(f"{layer}{apart}") and x.endswith(".w1.weight") for x in state)
            w1, w2, w3 = (
                torch.stack([state[f"{layer}{apart}experts.{i}.{part}.weight"] for i in range(count)])
                for part in ("w1", "w2", "w3")
            )
            found[f"{layer}.mlp.experts.gate_up_proj"] = torch.cat((w1, w3), 1)
            found[f"{layer}.mlp.experts.down_proj"] = w2
        elif not rest:
            found[name] = value
    return found
