"""What drawn recurrent nets, attention, Transformer layers and batch norms are by their formulas.

In: weights by name, inputs by name, a case. Out: what the module gives. Float64 runs it: no kernel of a whole
layer, no packed rows, no fast path.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

Tensors = Mapping[str, torch.Tensor]
EPS = 1e-5


class Own(NamedTuple):
    """A module of the own grammar: its class, what makes it, and how it is called."""

    name: str
    made: Mapping[str, Any]
    given: Mapping[str, Any]


def _turned(one: torch.Tensor, own: Own) -> torch.Tensor:
    """Rows of batch and time, of what has them in another order, and back again."""
    if own.given["rows"] == "unbatched":
        return one[0] if one.dim() > 2 else one[None]
    return one if own.made["batch_first"] else one.transpose(0, 1)


def recurrent(own: Own, weights: Tensors, x: Tensors) -> list[torch.Tensor]:
    """The steps of a recurrent net one after the other; a row that is over keeps its state."""
    made, given, whole = own.made, own.given, _turned(x["x"], own)
    batch, length = whole.shape[:2]
    ends = torch.tensor(given["lengths"] or [length] * batch, device=whole.device)[:, None]
    single, ways = given["rows"] == "unbatched", 1 + made["bidirectional"]
    count, width = made["num_layers"] * ways, made["hidden_size"]
    shapes = {"h": made.get("proj_size") or width, "c": width}
    states = {
        key: (x[key][:, None] if single else x[key]) if key in x else whole.new_zeros(count, batch, size)
        for key, size in shapes.items()
    }
    last: dict[str, list[torch.Tensor]] = {"h": [], "c": []}
    for layer in range(made["num_layers"]):
        out = []
        for way in range(ways):
            suffix, n = f"l{layer}{'_reverse' * way}", layer * ways + way
            named = (key for key in weights if key.endswith(f"_{suffix}"))
            its = {key.removesuffix(f"_{suffix}"): weights[key] for key in named}
            h, c, rows = states["h"][n], states["c"][n], [whole] * length
            inner = F.linear(whole, its["weight_ih"], its.get("bias_ih"))
            for t in range(length)[:: -1 if way else 1]:
                new, memory = _cell(own, its, inner[:, t], h, c)
                alive = ends > t
                h, c = torch.where(alive, new, h), torch.where(alive, memory, c)
                rows[t] = new * alive
            out.append(torch.stack(rows, 1))
            last["h"].append(h)
            last["c"].append(c)
        whole = torch.cat(out, -1)
    ended = [torch.stack(last[key]) for key in ("h", "c")[: 1 + (own.name == "LSTM")]]
    ended = [one[:, 0] for one in ended] if single else ended
    return [_turned(whole, own), *ended]


def _cell(
    own: Own, its: Tensors, inner: torch.Tensor, h: torch.Tensor, c: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step: the new state, and an LSTM's memory."""
    other = F.linear(h, its["weight_hh"], its.get("bias_hh"))
    if own.name == "LSTM":
        i, f, g, o = (inner + other).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        out = o.sigmoid() * c.tanh()
        return (F.linear(out, its["weight_hr"]) if "weight_hr" in its else out), c
    if own.name == "GRU":
        (r, z, n), (hr, hz, hn) = inner.chunk(3, -1), other.chunk(3, -1)
        n, z = (n + (r + hr).sigmoid() * hn).tanh(), (z + hz).sigmoid()
        return (1 - z) * n + z * h, c
    new = inner + other
    return (new.relu() if own.made["nonlinearity"] == "relu" else new.tanh()), c


def _added(masks: Sequence[torch.Tensor | None], heads: int, like: torch.Tensor) -> torch.Tensor:
    """Two masks, of places and of keys, as what is added to scores."""
    total = like.new_zeros(())
    for n, one in enumerate(masks):
        if one is None:
            continue
        added = like.new_zeros(one.shape).masked_fill(one, -torch.inf) if one.dtype is torch.bool else one
        if n:
            added = added.view(-1, 1, 1, added.shape[-1])
        elif added.dim() == 3:
            added = added.unflatten(0, (-1, heads))
        total = total + added
    return total


def attend(
    weights: Tensors, given: Sequence[torch.Tensor], made: Any, masks: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with its four products, of rows of batch and time: its result, and its weights."""
    heads, names = made["heads"], ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    parts = (
        weights["in_proj_weight"].chunk(3) if "in_proj_weight" in weights else [weights[one] for one in names]
    )
    biases = weights["in_proj_bias"].chunk(3) if "in_proj_bias" in weights else [None] * 3
    q, k, v = (F.linear(*each) for each in zip(given, parts, biases, strict=True))
    before = k.shape[1]
    if "bias_k" in weights:
        k, v = (
            torch.cat([one, weights[name].expand(len(one), 1, -1)], 1)
            for one, name in ((k, "bias_k"), (v, "bias_v"))
        )
    if made.get("add_zero_attn"):
        k, v = (F.pad(one, (0, 0, 0, 1)) for one in (k, v))
    q, k, v = (one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    added = _added(masks, heads, q)
    if added.dim():
        scores = scores + F.pad(added, (0, scores.shape[-1] - before))
    shares = scores.softmax(-1)
    out = (shares @ v).transpose(1, 2).flatten(2)
    return F.linear(out, weights["out_proj.weight"], weights.get("out_proj.bias")), shares


def attention(own: Own, weights: Tensors, x: Tensors) -> list[torch.Tensor]:
    """MultiheadAttention: its result, and its weights if they are asked for."""
    k = x.get("k", x["q"])
    whole = [_turned(one, own) for one in (x["q"], k, x.get("v", k))]
    masks, made = (x.get("mask"), x.get("padding")), {**own.made, "heads": own.made["num_heads"]}
    out, shares = attend(weights, whole, made, masks)
    if not own.given["weights"]:
        return [_turned(out, own)]
    shares = shares.mean(1) if own.given["averaged"] else shares
    return [_turned(out, own), shares[0] if own.given["rows"] == "unbatched" else shares]


def _of(weights: Tensors, prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): one for key, one in weights.items() if key.startswith(prefix)}


def _norm(weights: Tensors, x: torch.Tensor) -> torch.Tensor:
    off = x - x.mean(-1, keepdim=True)
    whole = off * (off.square().mean(-1, keepdim=True) + EPS).rsqrt() * weights["weight"]
    return whole + weights["bias"] if "bias" in weights else whole


def transformer(own: Own, weights: Tensors, x: Tensors) -> list[torch.Tensor]:
    """The layers of an encoder, or of a decoder if there is something to attend to besides."""
    made, whole = own.made, _turned(x["x"], own)
    memory = _turned(x["memory"], own) if "memory" in x else whole
    its = {"heads": made["nhead"]}

    for n in range(own.given["layers"]):
        w = _of(weights, f"layers.{n}.")

        def itself(y: torch.Tensor, w: Tensors = w) -> torch.Tensor:
            masks = (x.get("mask"), x.get("padding"))
            return attend(_of(w, "self_attn."), (y, y, y), its, masks)[0]

        def other(y: torch.Tensor, w: Tensors = w) -> torch.Tensor:
            masks = (x.get("memory mask"), x.get("memory padding"))
            return attend(_of(w, "multihead_attn."), (y, memory, memory), its, masks)[0]

        def inner(y: torch.Tensor, w: Tensors = w) -> torch.Tensor:
            y = F.linear(y, w["linear1.weight"], w.get("linear1.bias"))
            y = y.relu() if made["activation"] == "relu" else y * (1 + (y * 0.5**0.5).erf()) / 2
            return F.linear(y, w["linear2.weight"], w.get("linear2.bias"))

        parts = [itself, other, inner] if "memory" in x else [itself, inner]
        for part, place in zip(parts, itertools.count(1), strict=False):
            norm = _of(w, f"norm{place}.")
            whole = (
                whole + part(_norm(norm, whole)) if made["norm_first"] else _norm(norm, whole + part(whole))
            )
    whole = _norm(_of(weights, "norm."), whole) if own.given["norm"] else whole
    return [_turned(whole, own)]


def batch_norm(
    own: Own, weights: Tensors, state: dict[str, torch.Tensor], x: torch.Tensor, *, training: bool
) -> torch.Tensor:
    """Batch norm; its statistics move by the unbiased variance, or are means over all steps.

    `state` are these, and they move.
    """
    dims, shape = [0, *range(2, x.dim())], (1, -1, *[1] * (x.dim() - 2))
    mean, var = state.get("running_mean"), state.get("running_var")
    if training or mean is None or var is None:
        mine = x.mean(dims)
        off = (x - mine.view(shape)).square()
        if training and mean is not None and var is not None:
            state["num_batches_tracked"] = state["num_batches_tracked"] + 1
            share = own.made["momentum"] or 1.0 / float(state["num_batches_tracked"])
            count = x.numel() // x.shape[1]
            unbiased = off.detach().sum(dims) / (count - 1)
            state["running_mean"] = mean + share * (mine.detach() - mean)
            state["running_var"] = var + share * (unbiased - var)
        mean, var = mine, off.mean(dims)
    out = (x - mean.view(shape)) * (var.view(shape) + own.made["eps"]).rsqrt()
    if "weight" in weights:
        out = out * weights["weight"].view(shape) + weights["bias"].view(shape)
    return out
