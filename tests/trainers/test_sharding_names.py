"""FSDP2, DTensor and grouped attention with a torch older than their public names: stand-in modules."""

import importlib
import sys
from types import ModuleType

import pytest
import torch
from agree import different, same_sums

from layouts import sharding
from models import layers

OLD = {
    "torch.distributed.fsdp": "torch.distributed._composable.fsdp",
    "torch.distributed.tensor": "torch.distributed._tensor",
}
NAMES = {
    "torch.distributed.fsdp": ("MixedPrecisionPolicy", "fully_shard"),
    "torch.distributed.tensor": ("DTensor", "Replicate", "Shard"),
}


@pytest.mark.parametrize("moved", [("torch.distributed.fsdp",), tuple(OLD)], ids=["torch 2.5", "torch 2.4"])
def test_names_come_from_where_an_older_torch_has_them(
    moved: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for public in moved:
        earlier = ModuleType(OLD[public])
        vars(earlier).update({name: f"earlier {name}" for name in NAMES[public]})
        monkeypatch.setitem(sys.modules, public, ModuleType(public))
        monkeypatch.setitem(sys.modules, OLD[public], earlier)
    try:
        found = vars(importlib.reload(sharding))
        got = {name: str(found[name]) == f"earlier {name}" for names in NAMES.values() for name in names}
        assert got == {name: public in moved for public, names in NAMES.items() for name in names}
    finally:
        monkeypatch.undo()
        importlib.reload(sharding)


def test_key_heads_that_an_older_torch_cannot_share_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8) for heads in (4, 2, 2))
    grouped = layers.attention(q, k, v)
    assert layers._HAS_GROUPS
    monkeypatch.setattr(layers, "_HAS_GROUPS", False)
    same_sums(layers.attention(q, k, v), grouped, terms=16 + 8)
    swapped = layers.attention(q, k.flip(1), v)  # the order of the heads matters
    assert different(swapped, grouped)
