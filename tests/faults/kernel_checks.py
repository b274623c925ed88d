"""The checks that kernel mutants must fail, as the suite runs them, at sizes for a CPU. Nothing runs here."""

# ruff: noqa: E501 - a table of faults reads in rows
import functools
from collections.abc import Callable
from typing import Any

import kernel_standins as standins
from workloads import (
    activations,
    attention,
    attention_backends,
    attention_dropout,
    attention_masks,
    compiled_block,
    convolution,
    embedding,
    fp8,
    gemm,
    grouped_gemm,
    linear_losses,
    losses,
    norms,
    optimizers,
    reductions,
    repeatability,
)

Check = Callable[[], dict[str, Any]]


def default_is_fused() -> dict[str, Any]:
    """As test_attention_default_is_fused judges it."""
    chosen = [one["backend"] for one in attention_backends.chosen("bf16")]
    return {"cases": [{"failures": [one] if one in {"", "math"} else []} for one in chosen]}


# name: (check of the suite, what it runs)
CHECKS: dict[str, tuple[str, Check]] = {
    "gemm": ("test_kernels.py::test_gemm", functools.partial(gemm.check, "bf16", "smoke")),
    "gemm fp32": ("test_kernels.py::test_gemm", functools.partial(gemm.check, "fp32", "smoke")),
    "gemm default": ("test_kernels.py::test_fp32_is_ieee_by_default", gemm.default_precision),
    "attention": ("test_kernels.py::test_attention", functools.partial(attention.check, "bf16", "smoke")),
    "attention backend": ("test_attention.py::test_attention_backend", functools.partial(attention_backends.check, "bf16", "flash")),
    "rms_norm": ("test_kernels.py::test_rms_norm", functools.partial(norms.check, "rms_norm", "bf16", "smoke")),
    "layer_norm": ("test_kernels.py::test_layer_norm", functools.partial(norms.check, "layer_norm", "fp32", "smoke")),
    "cross_entropy": ("test_kernels.py::test_cross_entropy", functools.partial(losses.check, "fp32", "smoke")),
    "activations": ("test_kernels.py::test_activations_and_rope", functools.partial(activations.check, "bf16")),
    "activations fp32": ("test_kernels.py::test_activations_and_rope", functools.partial(activations.check, "fp32")),
    "reductions": ("test_kernels.py::test_softmax_and_reductions", functools.partial(reductions.check, "fp32", "smoke")),
    "embedding": ("test_kernels.py::test_embedding", functools.partial(embedding.check, "fp32")),
    "convolution": ("test_kernels.py::test_convolution", functools.partial(convolution.check, "fp32")),
    "adamw": ("test_kernels.py::test_adamw", optimizers.check),
    "fp8": ("test_kernels.py::test_fp8_gemm", functools.partial(fp8.check, "smoke")),
    "determinism": ("test_kernels.py::test_determinism", functools.partial(repeatability.deterministic, "bf16", 4)),
    "screen": ("test_kernels.py::test_no_silent_corruption", standins.screened),
    "attention default": ("test_attention.py::test_attention_default_is_fused", default_is_fused),
    "grouped": ("test_kernels.py::test_grouped_gemm", grouped_gemm.check),
    "compiled": ("test_kernels.py::test_compiled_block", functools.partial(compiled_block.check, "fp32")),
    "graph": ("test_kernels.py::test_graph_replay", functools.partial(repeatability.graph_replay, "bf16")),
    "gemm tf32": ("test_kernels.py::test_tf32_gemm", functools.partial(gemm.check, "tf32", "smoke")),
    "fp8 product": ("test_kernels.py::test_fp8_gemm", standins.fp8_product),
    "large": ("test_kernels.py::test_beyond_32_bits", standins.beyond_the_limit),
    "project kernels": ("test_kernels.py::test_project_triton_kernels", standins.trainers_kernels),
    "linear loss": ("test_kernels.py::test_linear_cross_entropy", functools.partial(linear_losses.check, "plain", "bf16")),
    "linear loss in chunks": ("test_kernels.py::test_linear_cross_entropy", functools.partial(linear_losses.check, "chunked", "bf16")),
    "varlen": ("test_attention.py::test_varlen_attention", functools.partial(attention_masks.packed, "mask")),
    "varlen package": ("test_attention.py::test_varlen_attention", standins.packed_by_package),
    "window": ("test_attention.py::test_sliding_window_attention", functools.partial(attention_masks.windowed, "mask")),
    "window package": ("test_attention.py::test_sliding_window_attention", standins.windowed_by_package),
    "flash package": ("test_attention.py::test_flash_attn_package", standins.flash_attn_package),
    "flash package rounded": ("test_attention.py::test_flash_attn_package_head_dims", standins.rounded_by_package),
    "flash package 4": ("test_attention.py::test_flash_attn_package", standins.by_package_4),
    "dropout": ("test_attention.py::test_attention_dropout", functools.partial(attention_dropout.check, "fp16")),
}  # fmt: skip
