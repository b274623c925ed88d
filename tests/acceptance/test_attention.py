"""Attention beyond its plain call: backends, packages, masks and dropout. In: one device. Out: cases.

`test_kernels.py::test_attention` is the plain call.
"""

import pytest

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
    """Each attention backend of the architecture runs when it is asked for, is what ran, and is right."""
    if backend not in on_device(arch.attention_backends):
        pytest.skip(f"this architecture has no {backend} attention")
    cases.require(on_device(attention_backends.check, dtype=dtype, backend=backend))
    cases.require(on_device(attention.check, dtype=dtype, tier=acceptance.tier, backend=backend))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_attn_package(dtype: str, acceptance: AcceptanceSession, on_device: OnDevice) -> None:
    """The flash_attn package is right forward and backward, and repeats its bits when asked to."""
    if not on_device(flash_package.available):
        pytest.skip("the flash_attn package is not part of this stack")
    cases.require(on_device(flash_package.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "torch", "package"])
def test_varlen_attention(way: str, on_device: OnDevice) -> None:
    """Sequences of different length packed into one row attend within themselves, forward and backward."""
    if reason := on_device(attention_masks.lacks, way=way):
        pytest.skip(reason)
    cases.require(on_device(attention_masks.packed, way=way, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "flex", "package"])
def test_sliding_window_attention(way: str, on_device: OnDevice) -> None:
    """Attention through a sliding window sees the window, all of it and nothing else, both ways."""
    if reason := on_device(attention_masks.lacks, way=way):
        pytest.skip(reason)
    cases.require(on_device(attention_masks.windowed, way=way, timeout_s=300))


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_dropout(dtype: str, on_device: OnDevice) -> None:
    """Dropout in attention drops its share of every head, query and key, and the same in the backward."""
    cases.require(on_device(attention_dropout.check, dtype=dtype))


@pytest.mark.gpus(1)
def test_attention_default_is_fused(on_device: OnDevice) -> None:
    """Attention without a named backend is not the slow formula in plain operations."""
    chosen = on_device(attention_backends.chosen, dtype="bf16")
    assert chosen["backend"] in {"flash", "efficient", "cudnn"}, f"what ran: {chosen}"
