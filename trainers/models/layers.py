"""What the model families share.

These are the base of every model, rotary positions, attention, and a loss that never holds all logits.

In: activations [batch, sequence, width]. Out: the same shape, or a scalar loss in float32.
"""

from __future__ import annotations

import inspect
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import flash4
from fused import ops
from fused.products import accumulate

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:  # before torch 2.10
    varlen_attn = None

_PRODUCTS_IN_FLOAT32 = hasattr(torch.ops.aten.mm, "dtype_out") and not torch.version.hip
# scaled_dot_product_attention has `enable_gqa` from torch 2.5 on (https://github.com/pytorch/pytorch/pull/132689).
_HAS_GROUPS = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
# torch 2.10 says causal by a flag of its own, later ones by the window (pytorch/pytorch#172245).
_CAUSAL: dict[str, Any] = (
    {"is_causal": True}
    if varlen_attn is not None and "is_causal" in inspect.signature(varlen_attn).parameters
    else {"window_size": (-1, 0)}
)
WHOLE, BY_ROWS = 1, 0  # numbers of chunks of the loss with a meaning of their own
ROWS = 8192  # of logits at a time: 2 GB of bfloat16 at Llama 3's vocabulary


class BlockModel(nn.Module):
    """What layouts need to know of a model.

    `blocks`: the layers, each sharded, gathered and compiled as one. `at_root`: children that stay in the
    root unit, because forward uses them before and after the blocks. `whole_graph`: each block compiles
    without a graph break. `copies`: names of weights that another stage holds too, and their names there.
    """

    config: Any  # each family has its own Config; layouts read `layers` only
    blocks: nn.ModuleDict
    at_root: tuple[str, ...] = ()
    whole_graph = True
    copies: Mapping[str, str] = MappingProxyType({})

    def our_name(self, name: str) -> str:
        """The name under which a weight is drawn: a library's own model translates it to this project's."""
        return self.copies.get(name, name)

    def statistics(self) -> dict[str, float]:
        """What the family adds to the record."""
        return {}


class Decoder(BlockModel):
    """Embedding, blocks, head. A pipeline stage holds some of the blocks, and the ends where it owns them.

    A family says its `block`, the `norm` before the head, and `context`: what each block gets beside x, with
    attention inside each of the documents (data.bounds) if there are any.
    """

    block: Callable[[], nn.Module]
    norm: Callable[[], nn.Module]
    context: Callable[[Tensor, Tensor | None], tuple[object, ...]]

    def __init__(self, config: Any, *, loss_chunks: int = 1, stage: tuple[int, int] = (0, 1)) -> None:
        super().__init__()
        index, stages = stage
        self.config = config
        span = range(index * config.layers // stages, (index + 1) * config.layers // stages)
        self.embedding = nn.Embedding(config.vocab, config.width) if index == 0 else None
        self.position = self.positions() if index == 0 else None
        # Keyed by the layer of the whole model: checkpoints fit every pipeline layout.
        self.blocks = nn.ModuleDict({str(layer): self.block() for layer in span})
        self.head = self._head(loss_chunks) if index == stages - 1 else None

    def positions(self) -> nn.Module | None:
        """A table of learned positions, where the family has one."""
        return None

    def _head(self, chunks: int) -> LossHead:
        out = nn.Linear(self.config.width, self.config.vocab, bias=False)
        if self.config.tied and self.embedding is not None:
            out.weight = self.embedding.weight
        return LossHead(self.norm(), out, chunks)

    def hidden(self, x: Tensor, documents: Tensor | None = None) -> Tensor:
        """Tokens, or the previous stage's activations, to this stage's last activations."""
        if self.embedding is not None:
            x = self.embedding(x)
        if self.position is not None:
            x = x + self.position(torch.arange(x.shape[1], device=x.device))
        return run_blocks(self.blocks, x, *self.context(x, documents))

    def logits(self, tokens: Tensor) -> Tensor:
        """[batch, sequence, vocabulary]."""
        assert self.head is not None, "only the last stage of a pipeline has logits"
        return self.head.logits(self.hidden(tokens))

    def forward(
        self, tokens: Tensor, labels: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Mean cross entropy; activations when this stage is not the last."""
        x = self.hidden(tokens, documents)
        return x if self.head is None else self.head(x, labels)


class Scaling(NamedTuple):
    """How rotary frequencies are stretched for sequences longer than those of the training before.

    All of them are divided by `factor`; with `positions` (that training's length) as Llama 3.1 does it:
    frequencies that turn fewer than `low` times in it are, those that turn more than `high` times are not,
    and between them a part of it is (transformers, modeling_rope_utils.py, llama3).
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    positions: int | None = None

    def stretch(self, frequency: Tensor) -> Tensor:
        """The frequencies, in radians a position, after this scaling."""
        if self.positions is None:
            return frequency / self.factor
        turns = self.positions * frequency / (2 * math.pi)
        kept = ((turns - self.low) / (self.high - self.low)).clamp(0, 1)
        return (1 - kept) * frequency / self.factor + kept * frequency


class Rotary(NamedTuple):
    """Cosines and sines of rotary positions, [sequence, head_dim / 2] in float32 (arXiv 2104.09864)."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def table(
        cls,
        seq_len: int,
        head_dim: int,
        theta: float,
        device: torch.device,
        scaling: Scaling | None = None,
    ) -> Rotary:
        """Angles position · theta^(-2i/head_dim), i the index of a pair of coordinates, then scaled."""
        exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        frequency = theta**-exponent if scaling is None else scaling.stretch(theta**-exponent)
        angle = torch.arange(seq_len, device=device, dtype=torch.float32)[:, None] * frequency
        return cls(angle.cos(), angle.sin())

    def turn(self, x: Tensor) -> Tensor:
        """Rotate x [batch, heads, sequence, head_dim]; halves are pairs, as in transformers."""
        first, second = x.float().chunk(2, -1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, -1).to(x.dtype)


def alibi_slopes(heads: int, bias_max: int = 8) -> Tensor:
    """Slope of each head's linear distance penalty (arXiv 2108.12409), heads in LLM Foundry's order."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = 1.0 / torch.pow(2, torch.arange(1, power + 1) * bias_max / power)
    if power != heads:
        slopes = torch.cat([slopes[1::2], slopes[::2]])[:heads]
    return slopes


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, bias: Tensor | None = None) -> Tensor:
    """Scaled dot-product attention over [batch, heads, sequence, head_dim].

    Query heads may share key heads.
    """
    if flash4.takes(q, bias):
        return flash4.attend(q, k, v, causal=causal)
    shared: dict[str, bool] = {}
    if q.shape[1] != k.shape[1] and _HAS_GROUPS:
        shared = {"enable_gqa": True}
    elif q.shape[1] != k.shape[1]:
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal and bias is None, **shared
    )


def document_mask(x: Tensor, bounds: Tensor) -> Tensor:
    """True where a query may look, [batch, 1, sequence, sequence]: earlier tokens of its own document.

    `bounds`: as data.bounds, of documents in x [batch, sequence, …].
    """
    place = torch.arange(x.shape[0] * x.shape[1], device=x.device, dtype=bounds.dtype)
    documents = torch.searchsorted(bounds, place, right=True).view(x.shape[:2])
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same & torch.ones(same.shape[-2:], dtype=torch.bool, device=x.device).tril()


def document_context(x: Tensor, bounds: Tensor) -> Tensor:
    """What attention inside documents needs: the bounds, or the whole mask where no kernel takes them."""
    varied = varlen_attn is not None and x.dtype in flash4.HALVES and not torch.version.hip
    whole = x.is_cuda and not (varied and torch.backends.cuda.flash_sdp_enabled())
    return document_mask(x, bounds) if whole else bounds


def document_attention(q: Tensor, k: Tensor, v: Tensor, context: Tensor | None) -> Tensor:
    """Causal attention inside documents; `context` as document_context makes it, or a bias, or nothing.

    With bounds alone, memory grows with the sequence and work with the squares of the documents: by torch's
    FlashAttention for sequences of any lengths, on a processor document by document.
    """
    if context is None or context.ndim > 1:
        return attention(q, k, v, bias=context)
    if torch.compiler.is_compiling() and not q.is_cuda:
        return attention(q, k, v, bias=document_mask(q.transpose(1, 2), context))
    batch, heads, length, _ = q.shape
    if q.is_cuda:
        assert varlen_attn is not None, "document_context asked for it"
        if q.shape[1] != k.shape[1]:
            k, v = (each.repeat_interleave(heads // k.shape[1], 1) for each in (k, v))
        rows = [each.transpose(1, 2).flatten(0, 1) for each in (q, k, v)]
        out = varlen_attn(*rows, context, context, length, length, **_CAUSAL)
        return out.unflatten(0, (batch, length)).transpose(1, 2)
    sizes = context.diff().tolist()
    parts = zip(*(each.transpose(0, 1).flatten(1, 2).split(sizes, 1) for each in (q, k, v)), strict=True)
    found = torch.cat([attention(*(each[None] for each in part))[0] for part in parts], 1)
    return found.unflatten(1, (batch, length)).transpose(0, 1)


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention to the last `window` positions, itself included, without a sequence² mask.

    Queries go in blocks of `window`; each sees its own block and the one before through one small mask
    [window, 2·window], so work and memory grow with sequence · window. FlashAttention 4 has windows itself.
    """
    batch, heads, length, dim = q.shape
    if length <= window:
        return attention(q, k, v)
    if flash4.takes(q, None):
        return flash4.attend(q, k, v, causal=True, window=window)
    q, k, v = (F.pad(x, (0, 0, 0, -length % window)).unflatten(2, (-1, window)) for x in (q, k, v))
    k, v = (torch.cat((F.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x), 3) for x in (k, v))
    blocks = q.shape[2]
    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)[None]
    band = (column > row) & (column <= row + window)
    first = (torch.arange(blocks, device=q.device) > 0)[:, None, None] | (column >= window)[None]
    mask = (band[None] & first).repeat(batch, 1, 1)[:, None]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    out = attention(q, k, v, causal=False, bias=mask)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).reshape(batch, heads, -1, dim)[:, :, :length]


class Part(NamedTuple):
    """This rank's part of the vocabulary: words from `begin` on. `group`: the ranks that have the others."""

    group: dist.ProcessGroup
    begin: int

    def cross_entropy_(self, logits: Tensor, labels: Tensor, scale: float) -> Tensor:
        """As ops.cross_entropy_, of this part's logits.

        Two small reductions: the maximum, then the sum beside the label's own. The sum keeps a NaN that a
        maximum may drop.
        """
        exact = logits.float()
        top = exact.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, self.group)
        exact = exact - top[:, None]
        place = labels - self.begin
        mine = (place >= 0) & (place < exact.shape[1])
        place = place.where(mine, 0)[:, None]
        wanted = exact.gather(1, place)[:, 0].where(mine, 0.0)
        sums = torch.stack((exact.exp_().sum(-1), wanted))
        dist.all_reduce(sums, group=self.group)
        counts = labels != ops.IGNORED
        exact = (exact / sums[0, :, None]).scatter_add_(1, place, -mine.float()[:, None])
        logits.copy_(exact * (scale * counts)[:, None])
        return (sums[0].log() - sums[1]).where(counts, 0.0)


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of x·weightᵀ; the gradient is made in forward, chunk by chunk, while logits exist.

    Each chunk's logits become their own gradient in place, in one pass (`ops.cross_entropy_`), and products
    add to the weight's gradient as they are made: no float32 logits, nothing computed twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, how: tuple[int, Part | None]) -> Tensor:
        chunks, part = how
        losses, dx = [], torch.empty_like(x)
        # One chunk is one product, which sums in float32 itself; more are summed in float32.
        kind = weight.dtype if chunks == 1 else torch.float32
        dweight = torch.empty_like(weight, dtype=kind)
        cross_entropy = part.cross_entropy_ if part else ops.pick("cross_entropy_", x.device)
        fresh = True
        for rows, target, out in zip(x.chunk(chunks), labels.chunk(chunks), dx.chunk(chunks), strict=True):
            logits = rows @ weight.t()
            losses.append(cross_entropy(logits, target, 1 / x.shape[0]))
            torch.mm(logits, weight, out=out)
            _add_product(dweight, logits.t(), rows, fresh=fresh)
            fresh = False
        if part:
            dist.all_reduce(dx, group=part.group)
        ctx.save_for_backward(dx, dweight.to(weight.dtype))
        return torch.cat(losses).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight = ctx.saved_tensors
        return dx * grad, dweight * grad, None, None


def _add_product(out: Tensor, a: Tensor, b: Tensor, *, fresh: bool) -> None:
    """As `accumulate`; a torch whose products must have the type of their operands rounds each one first."""
    if out.dtype == a.dtype or not a.is_cuda or _PRODUCTS_IN_FLOAT32:
        accumulate(out, a, b, fresh=fresh)
        return
    product = a @ b
    out.copy_(product) if fresh else out.add_(product)


@torch.compiler.disable
def chunked_loss(x: Tensor, weight: Tensor, labels: Tensor, chunks: int, part: Part | None = None) -> Tensor:
    """Mean cross entropy of x·weightᵀ. Not compiled: torch 2.11's compiler loses gradients made in place.

    Without gradients none is made.
    """
    if not torch.is_grad_enabled():
        run = part.cross_entropy_ if part else ops.pick("cross_entropy_", x.device)
        parts = zip(x.chunk(chunks), labels.chunk(chunks), strict=True)
        return torch.cat([run(rows @ weight.t(), target, 0.0) for rows, target in parts]).mean()
    loss: Tensor = _ChunkedLoss.apply(x, weight, labels, (chunks, part))
    return loss


class LossHead(nn.Module):
    """Final norm, projection to the vocabulary and mean cross entropy over all rows.

    A row whose label is ops.IGNORED has a loss of 0 and is counted; train.py divides by the labels of a step.

    `chunks` splits the rows before the projection: 8192 x 128256 logits are 4.2 GB in float32, thrice
    (pytorch/torchtitan#996). WHOLE is plain autograd. BY_ROWS makes chunks of about ROWS rows.

    `part`: set where tensor ranks share the vocabulary; `out.weight` is then a DTensor.
    """

    part: Part | None = None

    def __init__(self, norm: nn.Module, out: nn.Module, chunks: int) -> None:
        super().__init__()
        self.norm, self.out, self.chunks = norm, out, chunks

    def logits(self, x: Tensor) -> Tensor:
        """[batch, sequence, vocabulary] in the model's type."""
        return self.out(self.norm(x))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """Sum of the cross entropies over the number of positions, float32."""
        rows, labels = self.norm(x).flatten(0, 1), labels.flatten()
        if self.part:
            weight, chunks = self.out.weight.to_local(), self.chunks or -(-rows.shape[0] // ROWS)
            return chunked_loss(rows, weight, labels, chunks, self.part)
        if self.chunks == WHOLE:
            logits = self.out(rows).float()
            return F.cross_entropy(logits, labels, reduction="sum", ignore_index=ops.IGNORED) / labels.numel()
        chunks = self.chunks or -(-rows.shape[0] // ROWS)
        return chunked_loss(rows, self.out.weight, labels, chunks)


def run_blocks(blocks: nn.ModuleDict, x: Tensor, *context: object) -> Tensor:
    """Pass x through every block."""
    for block in blocks.values():
        x = block(x, *context)
    return x
