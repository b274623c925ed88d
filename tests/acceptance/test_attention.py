"""Attention: backends, packages, masks and dropout. In: one device. Out: the cases that failed.

The plain call is in `test_kernels.py::test_attention`.
"""

import pytest

from harness import skips
from harness.calls import OnDevice, Passes, RecordMetric
from harness.readings import needs_backend
from harness.session import AcceptanceSession
from workloads import (
    arch,
    attention,
    attention_backends,
    attention_dropout,
    attention_masks,
    attention_models,
    attention_packed,
    cases,
    flash_package,
)

HALVES = ("bf16", "fp16")
STANDARD = pytest.mark.tier("standard")
OPERATORS = attention_backends.OPERATORS
WAYS = attention_models.WAYS


@pytest.mark.long
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("backend", ["math", "flash", "efficient", "cudnn"])
def test_attention_backend(
    backend: str, dtype: str, acceptance: AcceptanceSession, on_device: OnDevice, record_metric: RecordMetric
) -> None:
    """Each attention backend of the architecture runs when it is requested, and its results are right."""
    needs_backend(backend, on_device(arch.attention_backends))
    ran = on_device(attention_backends.check, dtype=dtype, backend=backend)
    values = on_device(attention.check, dtype=dtype, tier=acceptance.tier, backend=backend)
    cases.require({"cases": ran["cases"] + values["cases"]}, record_metric)


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_attn_package(
    dtype: str, acceptance: AcceptanceSession, on_device: OnDevice, passes: Passes
) -> None:
    """The flash_attn package is right forward and backward, and is deterministic when that is requested."""
    if not on_device(flash_package.available):
        skips.without_package("flash-attn", "the flash_attn package is not part of this stack")
    passes(flash_package.check, dtype=dtype, tier=acceptance.tier)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_flash_attn_package_head_dims(dtype: str, on_device: OnDevice, passes: Passes) -> None:
    """The flash_attn package is right for head dimensions that are no multiple of 32, too."""
    if not on_device(flash_package.available):
        skips.without_package("flash-attn", "the flash_attn package is not part of this stack")
    passes(flash_package.check_rounded, dtype=dtype)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "torch", "package"])
def test_varlen_attention(way: str, on_device: OnDevice, passes: Passes) -> None:
    """Sequences packed into one row attend only to themselves, forward and backward."""
    skips.if_lacking(on_device(attention_masks.lacks, way=way))
    passes(attention_masks.packed, way=way, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.long
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "flex", "package"])
def test_sliding_window_attention(way: str, on_device: OnDevice, passes: Passes) -> None:
    """Sliding-window attention sees the whole window and nothing else, forward and backward."""
    skips.if_lacking(on_device(attention_masks.lacks_window, way=way))
    passes(attention_masks.windowed, way=way, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
def test_attention_dropout(dtype: str, passes: Passes) -> None:
    """Attention dropout drops its share of every head, query and key, and the backward drops the same."""
    passes(attention_dropout.check, dtype=dtype)


@pytest.mark.gpus(1)
def test_attention_default_is_fused(on_device: OnDevice) -> None:
    """Attention without a named backend runs a fused kernel, not the slow formula in plain operations."""
    fused = {"flash", "efficient", "cudnn"}
    for chosen in on_device(attention_backends.chosen, dtype="bf16"):
        ran = chosen["backend"] or "no backend"
        assert ran in fused, f"{ran} ran for {chosen['shape']}, expected one of {fused}: {chosen}"


@pytest.mark.long
@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("way", [w if w == "default" else pytest.param(w, marks=STANDARD) for w in WAYS])
def test_attention_of_models(
    way: str, dtype: str, acceptance: AcceptanceSession, on_device: OnDevice, passes: Passes
) -> None:
    """Attention as models call it is right and finite, forward and backward:
    padded batches, every kind of mask, uneven lengths, grouped heads, far scores, outlier channels and long
    windows.
    """
    if way in OPERATORS:
        needs_backend(way, on_device(arch.attention_backends))
    skips.if_lacking(on_device(attention_models.lacks, way=way))
    passes(attention_models.check, way=way, dtype=dtype, tier=acceptance.tier, timeout_s=300)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("way", ["mask", "torch", "package"])
def test_packed_members(way: str, on_device: OnDevice, passes: Passes) -> None:
    """Packed sequences are right with empty members, members of one token, and keys of other lengths."""
    skips.if_lacking(on_device(attention_masks.lacks, way=way))
    passes(attention_packed.check, way=way, timeout_s=300)
