"""Which file of a package a site copies, and what is said of one whose name no index tells here."""

from __future__ import annotations

from pathlib import Path

from stackcheck.imaging import mirror_list
from stackcheck.imaging.platforms import InstallTarget
from stackcheck.matrix import resolve
from stackcheck.recipe.indexes import IndexFile
from stackcheck.recipe.upstream import Upstream

ROOT = Path(__file__).resolve().parents[3]
TARGET = InstallTarget(platform="linux/amd64", python="3.12", glibc=39)


def files(*names: str) -> list[IndexFile]:
    return [IndexFile(name=name, sha256="0" * 64, size_bytes=1, index=None) for name in names]


def chosen(*names: str) -> str | None:
    found = mirror_list._chosen(files(*names), TARGET)
    return found.name if found else None


def test_the_file_is_the_one_that_pip_would_take() -> None:
    old, new = "a-1-cp312-cp312-manylinux2014_x86_64.whl", "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert chosen(old, new, "a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "a-1.tar.gz") == new
    assert chosen("a-1-py3-none-any.whl", old) == old
    assert chosen("a-1-cp312-cp312-manylinux_2_40_x86_64.whl", "a-1.tar.gz") == "a-1.tar.gz"
    assert chosen("a-1-cp312-cp312-macosx_11_0_arm64.whl") is None


def test_an_unlocked_stack_lists_what_it_asks_for_and_says_that_more_follows() -> None:
    (stack,) = resolve.load_stacks(ROOT, ("rocm7.2.4-torch2.13.0-*",))
    found = mirror_list.wanted(stack, ROOT / "images", Upstream())
    by_name = {one.name: one for one in found}
    assert by_name["torch==2.13.0+rocm7.2"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["triton-rocm==3.7.1"].place == "https://download.pytorch.org/whl/rocm7.2"
    assert by_name["numpy==2.4.6"].place == mirror_list.PACKAGE_INDEX
    assert "not locked" in by_name["torch==2.13.0+rocm7.2"].note
    assert by_name["flash_attn-2.8.3.tar.gz"].sha256
    assert by_name["ubuntu:24.04"].kind == "image"
    assert by_name["amd-smi-lib"].place == "https://repo.radeon.com/rocm/apt/7.2.4 noble main"
    assert len(by_name) == len(found)
