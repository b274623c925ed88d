"""The kernels of a training step against float64, and their speed. In: one device. Out: cases and figures."""

from typing import Any

import pytest
from workloads import attention, cases, gemm, losses, norms

HALVES = ("bf16", "fp16")


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_gemm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Matrix products of every layout and edge size are as good as their precision allows, both ways."""
    cases.require(on_device(gemm.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_attention(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Attention as a trainer calls it, forward and backward, masked, grouped and peaked, loses no key."""
    cases.require(on_device(attention.check, dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_rms_norm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """RMSNorm and its gradients hold over widths, scales, zero rows and a huge element."""
    cases.require(on_device(norms.check, norm="rms_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_layer_norm(dtype: str, acceptance: Any, on_device: Any) -> None:
    """LayerNorm and its gradients hold over widths, scales, constant rows and a huge element."""
    cases.require(on_device(norms.check, norm="layer_norm", dtype=dtype, tier=acceptance.tier))


@pytest.mark.gpus(1)
@pytest.mark.parametrize("dtype", ["fp32", *HALVES])
def test_cross_entropy(dtype: str, acceptance: Any, on_device: Any) -> None:
    """Cross entropy and its gradient hold for large vocabularies, peaked logits and ignored rows."""
    cases.require(on_device(losses.check, dtype=dtype, tier=acceptance.tier))
