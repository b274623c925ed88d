"""The own grammar of drawn modules: recurrent nets, attention, Transformer layers and batch norms.

In: a source of numbers. Out: how a module is made and called, its inputs, and the call of it.
"""

import functools
import itertools
import random
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import rnn

from workloads import generated_modules_plain as plain
from workloads import operands
from workloads.generated_modules_plain import Own, Tensors

if TYPE_CHECKING:
    from collections.abc import Callable

RECURRENT = ("RNN", "GRU", "LSTM")
LAYERS = ("TransformerEncoder", "TransformerDecoder")
NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
KINDS = (*RECURRENT, "MultiheadAttention", *LAYERS, *NORMS)
USUAL = 0.8  # of cases, what a fast path asks for
# On both sides of what kernels cut work into.
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256, 257)
LENGTHS = (1, 2, 3, 5, 8, 16, 17, 31, 33, 64, 65, 127, 200)
BATCHES = (1, 2, 3, 4, 5, 8, 16, 17, 31, 33)
HEADS, HEAD = (1, 2, 2, 3, 4, 8), (1, 3, 4, 8, 16, 17, 32, 33)
UNBATCHED, SORTED, UNSORTED = "unbatched", "sorted", "unsorted"
BOOL, FLOAT, EACH, CAUSAL = "bool", "float", "of each head", "causal"
MASKS, PADDINGS = ("", BOOL, FLOAT, EACH, CAUSAL), ("", "", "right", "scattered")
MOST_STEPS, MOST_PRODUCTS = 400, 2**23
SCORE = 32  # products: as much work is one number that attention weighs by
Given = dict[str, Any]
Drawn = tuple[Given, Given, int]  # what makes it, how it is called, and how much work that is


def draw(source: random.Random, name: str, *, training: bool) -> Own:
    """A module of a kind, and how it is called."""
    kinds: dict[str, Callable[[random.Random, str], Drawn]] = dict.fromkeys(RECURRENT, _recurrent)
    kinds |= dict.fromkeys(LAYERS, _layers) | dict.fromkeys(NORMS, _norm)
    draws = (kinds.get(name, _attention)(source, name) for _ in itertools.count())
    made, given, _ = next(one for one in draws if one[2] <= MOST_PRODUCTS)
    if name not in NORMS:
        # In training its results would be random, and by default it is 0.1.
        made["dropout"] = 0.0 if training else source.choice((0.0, 0.5))
    return Own(name, made, given)


def _coin(source: random.Random, share: float = 0.5) -> bool:
    return source.random() < share


def _recurrent(source: random.Random, name: str) -> Drawn:
    pick, coin = source.choice, functools.partial(_coin, source)
    width, own = pick(SIZES), pick(SIZES)
    made: Given = {"input_size": own, "hidden_size": width, "num_layers": pick((1, 2, 3, 4)), "bias": coin(),
            "batch_first": coin(), "bidirectional": coin()}  # fmt: skip
    if name == "RNN":
        made["nonlinearity"] = pick(("tanh", "relu"))
    if name == "LSTM" and width > 1 and coin():
        made["proj_size"] = source.randrange(1, width)
    rows = pick(("", UNBATCHED, SORTED, UNSORTED))
    batch, length = 1 if rows == UNBATCHED else pick(BATCHES), pick(LENGTHS)
    lengths = [source.randint(1, length) for _ in range(batch)] if rows in (SORTED, UNSORTED) else []
    lengths = sorted(lengths, reverse=True) if rows == SORTED else lengths
    given = {"batch": batch, "length": length, "rows": rows, "states": coin(), "lengths": tuple(lengths)}
    steps = length * made["num_layers"] * (1 + made["bidirectional"])
    too_long = steps > MOST_STEPS
    return made, given, MOST_PRODUCTS + 1 if too_long else steps * batch * 4 * width * (2 * width + own)


def _masks(source: random.Random) -> Given:
    pick = source.choice
    rows = pick(("", "", "", UNBATCHED))
    return {
        "rows": rows, "batch": 1 if rows else pick(BATCHES), "length": pick(LENGTHS), "mask": pick(MASKS),
        "padding": "" if rows else pick(PADDINGS),
    }  # fmt: skip


def _attention(source: random.Random, _: str) -> Drawn:
    pick, coin = source.choice, functools.partial(_coin, source)
    heads, given = pick(HEADS), _masks(source)
    width = heads * pick(HEAD)
    made: Given = {"embed_dim": width, "num_heads": heads, "bias": coin(USUAL), "add_bias_kv": coin(0.1),
            "add_zero_attn": coin(0.1), "batch_first": coin(USUAL)}  # fmt: skip
    given |= {"inputs": pick((1, 1, 2, 3)), "weights": coin(), "averaged": coin()}
    given["other"] = given["length"] if given["inputs"] == 1 else pick(LENGTHS)
    if given["inputs"] == 3 and coin():
        made |= {"kdim": pick(SIZES), "vdim": pick(SIZES)}
    score = 2 * width + SCORE * heads
    return made, given, given["batch"] * given["length"] * (4 * width * width + score * given["other"])


def _layers(source: random.Random, name: str) -> Drawn:
    pick, coin = source.choice, functools.partial(_coin, source)
    heads, given = pick(HEADS), _masks(source)
    width = heads * pick(HEAD)
    made: Given = {"d_model": width, "nhead": heads, "dim_feedforward": pick(SIZES),
            "batch_first": coin(USUAL), "activation": pick(("relu", "gelu")), "norm_first": coin(),
            "bias": coin(USUAL)}  # fmt: skip
    given |= {"layers": pick((1, 2, 3)), "norm": coin(), "nested": coin(), "other": given["length"]}
    inner: int = 4 * width + 2 * made["dim_feedforward"]
    if name == "TransformerDecoder":
        given |= {"memory": pick(LENGTHS), "memory mask": pick(MASKS[:4]), "memory padding": given["padding"]}
        inner += 4 * width
    rows = given["batch"] * given["length"] * given["layers"]
    scores = (2 * width + SCORE * heads) * (given["length"] + given.get("memory", 0))
    return made, given, rows * (width * inner + scores)


def _norm(source: random.Random, name: str) -> Drawn:
    pick, coin = source.choice, functools.partial(_coin, source)
    made: Given = {"num_features": pick(SIZES), "eps": 1e-3, "momentum": pick((None, 0.1, 0.3, 1.0)),
            "affine": coin(), "track_running_stats": coin(0.8)}  # fmt: skip
    dims = 0 if name == "BatchNorm1d" and coin() else int(name[-2])
    rest = tuple(pick((1, 2, 3, 7, 8, 9, 16, 17)) for _ in range(dims))
    return made, {"batch": pick(BATCHES[1:]), "rest": rest}, made["num_features"] * 2**10


def module(own: Own) -> nn.Module:
    """The module, with whatever weights."""
    name, made, given = own
    if name not in LAYERS:
        its: nn.Module = getattr(nn, name)(**made)
        return its
    layer = getattr(nn, f"{name}Layer")(**made)
    norm = nn.LayerNorm(made["d_model"], bias=made["bias"]) if given["norm"] else None
    more = {"enable_nested_tensor": given["nested"]} if name == "TransformerEncoder" else {}
    stack: nn.Module = getattr(nn, name)(layer, given["layers"], norm, **more)
    return stack


def inputs(own: Own, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """The operands beside weights and buffers, by name."""
    name, made, given = own
    batch = [] if given.get("rows") == UNBATCHED else [given["batch"]]

    def normal(n: int, *shape: int) -> torch.Tensor:
        return operands.normal(*shape, dtype=dtype, seed=seed + n).cpu()

    def rows(n: int, length: str, width: int) -> torch.Tensor:
        shape = [*batch, given[length], width] if made["batch_first"] else [given[length], *batch, width]
        return normal(n, *shape)

    if name in NORMS:
        return {"x": normal(0, *batch, made["num_features"], *given["rest"])}
    if name in RECURRENT:
        found = {"x": rows(0, "length", made["input_size"])}
        count = made["num_layers"] * (1 + made["bidirectional"])
        sizes = {"h": made.get("proj_size") or made["hidden_size"], "c": made["hidden_size"]}
        kept = ("h", "c")[: 1 + (name == "LSTM")] if given["states"] else ()
        return found | {key: normal(n, count, *batch, sizes[key]) for n, key in enumerate(kept, 1)}
    if name == "MultiheadAttention":
        width = made["embed_dim"]
        widths = {"q": width, "k": made.get("kdim", width), "v": made.get("vdim", width)}
        keys = "qkv"[: given["inputs"]]
        found = {key: rows(n, "other" if n else "length", widths[key]) for n, key in enumerate(keys)}
    else:
        found = {"x": rows(0, "length", made["d_model"])}
        found |= {"memory": rows(1, "memory", made["d_model"])} if "memory" in given else {}
    return (
        found
        | _masked(own, "", given["other"], dtype, seed)
        | (_masked(own, "memory ", given["memory"], dtype, seed + 1) if "memory" in given else {})
    )


def _masked(own: Own, prefix: str, other: int, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Masks of places and of keys; the first key is always seen: of none there is no right result."""
    given, source, found = own.given, torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
    kind, padding, batch = given[f"{prefix}mask"], given[f"{prefix}padding"], given["batch"]
    heads = own.made.get("num_heads") or own.made["nhead"]
    shape = [batch * heads] * (kind == EACH) + [given["length"], other]
    if kind == CAUSAL:
        found["mask"] = torch.ones(shape, dtype=torch.bool).triu(1)
    elif kind == FLOAT:
        found["mask"] = torch.randn(shape, generator=source).to(dtype)
    elif kind:
        found["mask"] = torch.rand(shape, generator=source) < 0.4
        found["mask"][..., 0] = False
    if padding:
        lengths = torch.randint(1, other + 1, (batch, 1), generator=source)
        found["padding"] = torch.arange(other) >= lengths
        if padding == "scattered":
            found["padding"] = torch.rand(batch, other, generator=source) < 0.4
        found["padding"][:, 0] = False
        if kind == FLOAT:  # torch asks for masks of one type
            none = torch.zeros(found["padding"].shape, dtype=dtype)
            found["padding"] = none.masked_fill(found["padding"], -torch.inf)
    return {prefix + key: one for key, one in found.items()}


def called(net: Any, own: Own, x: Tensors) -> Any:
    """What a module gives for these inputs."""
    mask, padding, causal = x.get("mask"), x.get("padding"), own.given.get("mask") == CAUSAL
    if own.name in NORMS:
        return net(x["x"])
    if own.name in RECURRENT:
        return _run(net, own, x)
    if own.name == "MultiheadAttention":
        k = x.get("k", x["q"])
        return net(
            x["q"], k, x.get("v", k), key_padding_mask=padding, need_weights=own.given["weights"],
            attn_mask=mask, average_attn_weights=own.given["averaged"], is_causal=causal,
        )  # fmt: skip
    if own.name == "TransformerEncoder":
        out = net(x["x"], mask=mask, src_key_padding_mask=padding, is_causal=causal)
    else:
        out = net(
            x["x"], x["memory"], tgt_mask=mask, memory_mask=x.get("memory mask"), tgt_is_causal=causal,
            tgt_key_padding_mask=padding, memory_key_padding_mask=x.get("memory padding"),
        )  # fmt: skip
    return [_without_padding(out, own, x)]


def _without_padding(out: torch.Tensor, own: Own, x: Tensors) -> torch.Tensor:
    """Rows of the padding are whatever they are: a fast path gives zeros for them."""
    padding = x.get("padding")
    if padding is None:
        return out
    hidden = padding if padding.dtype is torch.bool else padding == -torch.inf
    return out.masked_fill((hidden if own.made["batch_first"] else hidden.T)[..., None], 0.0)


def _run(net: Any, own: Own, x: Tensors) -> Any:
    given, first, several = own.given, own.made["batch_first"], own.name == "LSTM"
    states: Any = tuple(x[key] for key in "hc" if key in x) or None
    states = states[0] if states and not several else states
    if not given["lengths"]:
        out, ended = net(x["x"], states)
    else:
        packed = rnn.pack_padded_sequence(
            x["x"], list(given["lengths"]), batch_first=first, enforce_sorted=given["rows"] == SORTED
        )
        packed, ended = net(packed, states)
        out, _ = rnn.pad_packed_sequence(packed, batch_first=first, total_length=given["length"])
    return [out, *(ended if several else [ended])]


def formula(own: Own, weights: Tensors, state: dict[str, torch.Tensor], x: Tensors, *, training: bool) -> Any:
    """The same by its formula; `state` are the buffers, which move."""
    if own.name in NORMS:
        return plain.batch_norm(own, weights, state, x["x"], training=training)
    if own.name in RECURRENT:
        return plain.recurrent(own, weights, x)
    if own.name == "MultiheadAttention":
        return plain.attention(own, weights, x)
    return [_without_padding(one, own, x) for one in plain.transformer(own, weights, x)]
