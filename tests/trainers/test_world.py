"""A process that cannot take its place among the ranks says so before it opens a group."""

import importlib.util

import pytest
import torch.distributed as dist

import options
import world
from errors import RefusedError


def test_a_missing_numpy_is_named_before_ranks_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numpy" else name)
    with pytest.raises(RefusedError, match="pip install numpy"), world.joined_ranks(options.parse([])):
        pass
    assert not dist.is_initialized()
