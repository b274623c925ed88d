"""A small model with what layouts of training have to get right, and one rank that has all of its data.

In: a case. Out: a model; losses and gradients of each chunk of data at given weights; what AdamW makes of
a gradient, in float64.
"""

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Tensors = dict[str, torch.Tensor]
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LR, BETAS = 0.01, (0.9, 0.999)
RANK = 2  # of an adapter beside a frozen matrix


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the weights and their gradients are, and what is kept between forward and backward."""

    parallel: str
    memory: str = "plain"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, option: str) -> Any:
        """An option; `None` where this layout has none of this name."""
        return self.options.get(option)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Sizes, conditions of the model, and how it is trained: `layouts` are those of the steps in turn."""

    numbers: int
    sizes: Mapping[str, int]
    kind: str
    chunks: int
    layouts: tuple[Layout, ...]
    traits: Mapping[str, str] = field(default_factory=dict)
    steps: int = 1
    clip: bool = False
    adamw: str = "for"
    late: bool = False

    def __getitem__(self, trait: str) -> str:
        """A condition of the model; empty where the case has none of this name."""
        return self.traits.get(trait, "")

    def uses(self, step: int, chunk: int) -> bool:
        """Whether the branch is taken by a chunk of data."""
        return (self.numbers + 5 * step + (3 * chunk if self["branch"] == "chunk" else 0)) % 4 > 1


class Block(nn.Module):  # type: ignore[misc]
    """x + down(gelu(up(norm(x)))), with adapters and a branch where the case has them."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        width, hidden = case.sizes["width"], case.sizes["hidden"]
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)
        self.side = nn.Linear(width, width) if case["branch"] else None
        adapted = case["frozen"] == "all but adapters"
        self.adapter = nn.Sequential(nn.Linear(width, RANK), nn.Linear(RANK, width)) if adapted else None

    def forward(self, x: torch.Tensor, branch: bool) -> torch.Tensor:
        """Run the block."""
        x = x.to(self.norm.weight.dtype)
        normed = self.norm(x)
        out: torch.Tensor = x + self.down(functional.gelu(self.up(normed)))
        if self.adapter is not None:
            out = out + self.adapter(normed)
        return out + self.side(normed) if self.side is not None and branch else out


class Model(nn.Module):  # type: ignore[misc]
    """An embedding, blocks, a norm and a head; `spare` has an output that no loss reads."""

    def __init__(self, case: Case, seed: int) -> None:
        super().__init__()
        width, vocab, self.case = case.sizes["width"], case.sizes["vocab"], case
        self.embedding, self.norm = nn.Embedding(vocab, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(case) for _ in range(case.sizes["blocks"]))
        self.head = nn.Linear(width, vocab, bias=False)
        self.spare = nn.Linear(width, vocab) if case["spare"] else None
        self.gain = nn.Parameter(torch.ones(() if case["gain"] == "scalar" else 1)) if case["gain"] else None
        if case["buffers"]:
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        if case["buffers"] == "means":
            self.register_buffer("means", torch.zeros(width))
        self.recomputed = False
        self._fill(case, torch.Generator().manual_seed(seed))

    def _fill(self, case: Case, numbers: torch.Generator) -> None:
        if case["tied"]:
            self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            scale = 1.0 if "norm.weight" in name or name == "gain" else 0.0
            weight.data = scale + 0.1 * torch.randn(weight.shape, generator=numbers)
            weight.requires_grad_(not FROZEN[case["frozen"]](name))
        if case["mixed"]:
            self.blocks[-1].bfloat16()

    def keep(self, parts: Collection[int]) -> None:
        """Drop all parts but some: 0 is the embedding, the next are the blocks, the last is the head."""
        if 0 not in parts:
            self.embedding = self.gain = None
            for name, _ in list(self.named_buffers()):
                delattr(self, name)
        for number in range(len(self.blocks)):
            if number + 1 not in parts:
                self.blocks[number] = None
        if len(self.blocks) + 1 not in parts:
            self.norm = self.head = self.spare = None

    def forward(self, x: torch.Tensor, branch: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits of tokens, and the output that is never used; of a part, what the next part takes."""
        if self.embedding is not None:
            x = self._embedded(x)
        for number, block in enumerate(self.blocks):
            for _ in range(0 if block is None else 2 if self.case["twice"] and not number else 1):
                x = checkpoint(block, x, branch, use_reentrant=False) if self.recomputed else block(x, branch)
        if self.head is None:
            return x, None
        x = self.norm(x.to(self.norm.weight.dtype))
        return self.head(x), self.spare(x) if self.spare is not None else None

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embedding(tokens)
        if self.gain is not None:
            x = x * self.gain
        return self._with_buffers(x) if self.case["buffers"] else x

    def _with_buffers(self, x: torch.Tensor) -> torch.Tensor:
        """What the buffers make of it; each call changes them."""
        x = x * (1 + self.count.to(x.dtype) / 64)
        self.count.add_(1)
        if self.case["buffers"] == "means":
            moved = x.detach().to(self.means.dtype).mean((0, 1))
            x = x - self.means.to(x.dtype)
            self.means.copy_(self.means / 2 + moved / 2)
        return x


FROZEN: dict[str, Callable[[str], bool]] = {
    "": lambda _: False,
    "embedding": lambda name: name == "embedding.weight",
    "a block": lambda name: name.startswith("blocks.0."),
    "all but adapters": lambda name: "adapter" not in name and not name.startswith("norm"),
}


@dataclass
class Alone:
    """One rank with the data of all, in a type: float64 is right, and in the case's type is the yardstick."""

    case: Case
    device: torch.device
    kind: torch.dtype | None = None  # in which all is computed; else weights as they are, under autocast
    buffers: list[Tensors] = field(default_factory=list)  # of each data rank
    fresh: bool = True  # whether DDP sends the buffers of rank 0 before the next pass
    terms: float = 0.0  # of a step: the sum of the absolute values of what a gain's gradient adds up

    def __post_init__(self) -> None:
        """Make the model, whose weights are replaced in each step."""
        self.model = Model(self.case, 0).to(self.device)
        if self.kind == torch.float64:
            self.model.double()

    def chunk_by_chunk(self, weights: Tensors, step: int, layout: Layout, groups: int) -> Iterator[Any]:
        """The loss and the gradients of each chunk, as its rank has them, not divided by the ranks."""
        held = dict(self.model.named_parameters())
        for name, weight in held.items():
            weight.data.copy_(weights[name])
        mine = {name: one.clone() for name, one in self.model.named_buffers()}
        self.terms, now = 0.0, self.buffers or [mine]
        self.buffers = [copy.deepcopy(now[rank % len(now)]) for rank in range(groups)]
        passes = self.case.chunks // groups
        for number, tokens in enumerate(chunks_of(self.case, step)):
            turn, rank = divmod(number, groups)
            if not rank and layout["forward_sync_buffers"] and self.fresh:
                self.buffers = [copy.deepcopy(self.buffers[0]) for _ in range(groups)]
            self.fresh = syncs(layout, turn, passes)
            shares = Shares.of(self.case, layout, passes)
            yield self._one(held, tokens.to(self.device), self.case.uses(step, number), rank, shares)

    def _one(self, held: Tensors, tokens: torch.Tensor, branch: bool, rank: int, shares: "Shares") -> Any:
        if self.model.gain is not None and self.kind == torch.float64:
            self._restore(rank)
            self.terms += float(self.by_number(tokens, branch).abs().sum()) / shares.passes
        self._restore(rank)
        call = self.model
        if self.kind is not None:
            cast = {name: one.to(self.kind) for name, one in held.items()}
            call = lambda *a: torch.func.functional_call(self.model, cast, a)  # noqa: E731 - one call
        autocast = self.kind is None and self.case.kind == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16, autocast):
            loss = loss_of(call, tokens, branch, shares.reduction)
        trained = {name: one for name, one in held.items() if one.requires_grad}
        got = torch.autograd.grad(loss / shares.before, list(trained.values()), allow_unused=True)
        found = {
            name: torch.zeros_like(one) if gradient is None else gradient / shares.after
            for (name, one), gradient in zip(trained.items(), got, strict=True)
        }
        self.buffers[rank] = {name: one.clone() for name, one in self.model.named_buffers()}
        return loss.detach().double().cpu() / shares.terms, {
            name: one.detach().cpu() for name, one in found.items()
        }

    def _restore(self, rank: int) -> None:
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[rank][name])

    def by_number(self, tokens: torch.Tensor, branch: bool) -> torch.Tensor:
        """The gradients of a gain for each number that it scales, batch by length by width.

        They cancel, as the result of a norm does not depend on the size of its input.
        """
        width = self.case.sizes["width"]
        gains = self.model.gain.detach().expand(*tokens[:, :-1].shape, width).clone().requires_grad_()
        call = functools.partial(torch.func.functional_call, self.model, {"gain": gains})
        (found,) = torch.autograd.grad(loss_of(lambda *given: call(given), tokens, branch), gains)
        return found


@dataclass
class Adam:
    """AdamW in float64, from the weights and gradients that a job has."""

    epsilon: float
    state: dict[str, list[tuple[torch.Tensor, torch.Tensor, int]]] = field(default_factory=dict)

    def moved(
        self, name: str, before: torch.Tensor, gradient: torch.Tensor, got: torch.Tensor
    ) -> torch.Tensor:
        """The weight after a step. Without a gradient it may stay, or move on by its momentum."""
        zeros, (one, two), g = torch.zeros_like(before, dtype=torch.float64), BETAS, gradient.double()
        ways = []
        for old in self.state.get(name, [(zeros, zeros, 0)]):
            first, second, steps = (
                one * old[0] + (1 - one) * g,
                two * old[1] + (1 - two) * g.square(),
                old[2] + 1,
            )
            scale = (second / (1 - two**steps)).sqrt() + self.epsilon
            ways.append((before.double() - LR * first / (1 - one**steps) / scale, (first, second, steps)))
            ways += [] if g.any() else [(before.double(), old)]
        after = min((way for way, _ in ways), key=lambda way: float((way - got).abs().max()))
        self.state[name] = [state for way, state in ways if torch.equal(way, after)]
        return after


def syncs(layout: Layout, turn: int, passes: int) -> bool:
    """Whether the gradients of a pass are reduced after it."""
    return turn + 1 == passes or layout["sync"] in {None, "each"}


def chunks_of(case: Case, step: int) -> list[torch.Tensor]:
    """The tokens of one step, in one chunk for each of the backward passes of one rank alone."""
    numbers = torch.Generator().manual_seed(case.numbers % 2**31 + 7919 * step)
    shape = (case.sizes["batch"], case.sizes["length"] + 1)
    return [torch.randint(case.sizes["vocab"], shape, generator=numbers) for _ in range(case.chunks)]


@dataclass(frozen=True)
class Shares:
    """What makes the mean of several passes of each loss: what divides it, and what its gradient after."""

    passes: int
    reduction: str = "mean"
    terms: int = 1  # of a loss that is their sum
    before: int = 1
    after: int = 1

    @classmethod
    def of(cls, case: Case, layout: Layout, passes: int) -> "Shares":
        """As a layout was asked for: it divides the sum of the passes, or the caller, before or after."""
        if layout["loss"] == "mean":
            return cls(passes, after=passes)
        if layout["loss"] == "sum":
            terms = case.sizes["batch"] * case.sizes["length"]
            return cls(passes, "sum", terms, after=passes * terms)
        return cls(passes, before=passes)


def loss_of(model: Any, tokens: torch.Tensor, branch: bool, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of the next token, mean or sum."""
    return entropy(model(tokens[:, :-1], branch)[0], tokens[:, 1:], reduction)


def entropy(logits: torch.Tensor, after: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross entropy of logits beside the tokens that come after, mean or sum."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(wide.flatten(0, 1), after.flatten(), reduction=reduction)
