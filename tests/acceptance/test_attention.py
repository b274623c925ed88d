"""Attention: backends, packages, masks and dropout. In: one device. Out: the cases that failed.

The plain call is in `test_kernels.py::test_attention`.
"""

import pytest

from harness import skips
from harness.fixtures import OnDevice
from harness.session import AcceptanceSession
from workloads import (
    arch,
    attention,
    attention_backends,
    attention_dropout,
    attention_masks,
    cases,
    flash_package,
)

HALVES = ("bf16", "fp16")


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_attention_backend(
    backend: str, dtype: str, acceptance: AcceptanceSession, on_device: OnDevice
) -> None:
    """Each attention backend of the architecture runs when it is requested, and its results are right."""
    if backend not in on_device(arch.attention_backends):
        skips.without_feature(f"attention: {backend}", f"this architecture has no {backend} attention")
    cases.require(on_device(attention_backends.check, dtype=dtype, backend=backend))
    cases.require(on_device(attention.check, dtype=dtype, tier=acceptance.tier, backend=backend))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_attn_package(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """The flash_attn package is right forward and backward, and is deterministic when that is requested."""
    if not on_device(flash_package.available):
        skips.without_package("flash-attn", "the flash_attn package is not part of this stack")
    cases.require(on_device(flash_package.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "torch", "package"])
def test_varlen_attention(way: str, on_device: OnDevice) -> None:
    """Sequences packed into one row attend only to themselves, forward and backward."""
    skips.if_lacking(on_device(attention_masks.lacks, way=way))
    cases.require(on_device(attention_masks.packed, way=way, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "flex", "package"])
def test_sliding_window_attention(way: str, on_device: OnDevice) -> None:
    """Sliding-window attention sees the whole window and nothing else, forward and backward."""
    skips.if_lacking(on_device(attention_masks.lacks, way=way))
    cases.require(on_device(attention_masks.windowed, way=way, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_dropout(dtype: str, on_device: OnDevice) -> None:
    """Attention dropout drops its share of every head, query and key, and the backward drops the same."""
    cases.require(on_device(attention_dropout.check, dtype=dtype))


@pytest.mark.gpus(1)
def test_attention_default_is_fused(on_device: OnDevice) -> None:
    """Attention without a named backend runs a fused kernel, not the slow formula in plain operations."""
    chosen = on_device(attention_backends.chosen, dtype="bf16")
    fused = {"flash", "efficient", "cudnn"}
    assert chosen["backend"] in fused, (
        f"{chosen['backend'] or 'no backend'} ran, expected one of {fused}: {chosen}"
    )
