"""Packed sequences with empty members, members of one token, and keys longer or shorter than the queries.

In: a way of `attention_masks` (`mask`, `torch`, `package`). Out: the report of `cases.run`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from workloads import attention, cases, device, flash_package


@dataclass(frozen=True)
class Pack:
    """How many queries and keys each member has; every member with queries has keys."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = False


OWN = (0, 1, 64, 0, 192, 1, 127, 0)
PACKS = {
    "empty and one-token members": Pack(OWN, OWN, causal=True),
    # Members of one key have no gradient of q and k at all, so another member gives the scale of errors.
    "keys of one token": Pack((5, 64, 1, 130, 64), (1, 1, 1, 1, 65)),
    "keys of other lengths": Pack((64, 1, 127, 192), (192, 33, 320, 1)),
}
Attend = Callable[[Pack, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def check(way: str) -> dict[str, Any]:
    """Every pack, with bf16 and fp16, with scores around 0 and peaked ones."""
    return cases.run(_cases(WITH[way]))


def _cases(attend: Attend) -> Iterator[cases.Case]:
    for (name, pack), dtype in itertools.product(PACKS.items(), ("bf16", "fp16")):
        for peaked in (False, True):
            words = f"{name} {dtype} {'peaked' if peaked else 'normal'}"
            shape = attention.Shape(b=1, hq=2, hkv=2, sq=sum(pack.queries), sk=sum(pack.keys), peaked=peaked)
            call = functools.partial(attend, pack)
            yield words, functools.partial(attention.against_float64, call, shape, dtype, seen=seen(pack))


def seen(pack: Pack) -> torch.Tensor:
    """(queries, keys): True within one member, and up to the query's own place where the pack is causal."""
    owners = [
        torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(device())
        for lengths in (pack.queries, pack.keys)
    ]
    same = owners[0][:, None] == owners[1]
    return same.tril() if pack.causal else same


def _by_mask(pack: Pack, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen(pack))


def _arguments(
    pack: Pack, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor | int, ...]:
    """As the packed functions take them: (T, H, D), where members begin and end, the longest of each."""
    rows = (tensor[0].transpose(0, 1) for tensor in (q, k, v))
    return (*rows, ends(pack.queries), ends(pack.keys), max(pack.queries), max(pack.keys))


def ends(lengths: tuple[int, ...]) -> torch.Tensor:
    """Where members begin and end, as the packed functions take it."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device())


def _by_torch(pack: Pack, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn

    # 2.10 has is_causal; later releases express it as a window without an end to the left.
    windows = "window_size" in inspect.signature(varlen_attn).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if windows else {"is_causal": True}
    return varlen_attn(*_arguments(pack, q, k, v), **(causal if pack.causal else {})).transpose(0, 1)[None]


def _by_package(pack: Pack, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    *rows, begins, key_begins, longest, key_longest = _arguments(pack, q, k, v)
    out = flash_package.packed_rows(rows, (begins, key_begins), (longest, key_longest), causal=pack.causal)
    return out.transpose(0, 1)[None]


WITH: dict[str, Attend] = {"mask": _by_mask, "torch": _by_torch, "package": _by_package}
