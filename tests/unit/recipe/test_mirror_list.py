"""What a site copies for a stack of which no index tells the files' names here."""

from __future__ import annotations

from pathlib import Path

from stackcheck.matrix import resolve
from stackcheck.recipe import mirror_list
from stackcheck.recipe.upstream import Upstream

ROOT = Path(__file__).resolve().parents[3]


def test_an_unlocked_stack_lists_what_it_asks_for_and_says_that_more_follows() -> None:
    (stack,) = resolve.load_stacks(ROOT, ("rocm7.2.1-torch2.13.0-*",))
    found = mirror_list.wanted(stack, ROOT / "images", Upstream(), lambda _: None)
    by_name = {one.name: one for one in found}
    assert by_name["torch==2.13.0+rocm7.2"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["triton-rocm==3.7.1"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["numpy==2.4.6"].place == mirror_list.PACKAGE_INDEX
    assert "not locked" in by_name["torch==2.13.0+rocm7.2"].note
    assert by_name["flash_attn-2.8.3.tar.gz"].sha256
    assert by_name["ubuntu:24.04"].kind == "image"
    assert by_name["amd-smi-lib"].place == "https://repo.radeon.com/rocm/apt/7.2.1 noble main"
    assert len(by_name) == len(found)
