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
    attention_models,
    attention_packed,
    compiled_block,
    convolution,
    embedding,
    flash_package,
    fp8,
    fp8_recipes,
    gemm,
    graph_processes,
    grouped_gemm,
    large_models,
    large_tensors,
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


def _or_refusal(check: Callable[..., dict[str, Any]], *words: str) -> dict[str, Any]:
    """A check's report; what it raises because of a refusal is a failure."""
    try:
        return check(*words)
    except AssertionError as error:
        return {"cases": [{"failures": [str(error)]}]}


# name: (check of the suite, what it runs)
CHECKS: dict[str, tuple[str, Check]] = {
    "gemm": ("test_kernels.py::test_gemm", functools.partial(gemm.check, "bf16", "smoke")),
    "gemm fp32": ("test_kernels.py::test_gemm", functools.partial(gemm.check, "fp32", "smoke")),
    # Of float32: oneDNN multiplies halves with AMX as the mutants do (uxlfoundation/oneDNN#5717).
    "rows": ("test_kernels.py::test_rows_of_a_product", functools.partial(gemm.rows, "fp32")),
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
    "fp8 product": ("test_kernels.py::test_fp8_gemm", functools.partial(standins.in_8_bits, fp8.check, "smoke")),
    "large": ("test_kernels.py::test_beyond_32_bits", functools.partial(large_tensors.check, standins.SMALL)),
    "project kernels": ("test_kernels.py::test_project_triton_kernels", standins.trainers_kernels),
    "linear loss": ("test_kernels.py::test_linear_cross_entropy", functools.partial(linear_losses.check, "plain", "bf16")),
    "linear loss in chunks": ("test_kernels.py::test_linear_cross_entropy", functools.partial(linear_losses.check, "chunked", "bf16")),
    "varlen": ("test_attention.py::test_varlen_attention", functools.partial(attention_masks.packed, "mask")),
    "varlen package": ("test_attention.py::test_varlen_attention", functools.partial(standins.by_package, attention_masks.packed, "package")),
    "window": ("test_attention.py::test_sliding_window_attention", functools.partial(attention_masks.windowed, "mask")),
    "window package": ("test_attention.py::test_sliding_window_attention", functools.partial(standins.by_package, attention_masks.windowed, "package")),
    "flash package": ("test_attention.py::test_flash_attn_package", functools.partial(standins.by_package, flash_package.check, "bf16", "smoke")),
    "flash package rounded": ("test_attention.py::test_flash_attn_package_head_dims", functools.partial(standins.by_package, flash_package.check_rounded, "bf16")),
    "flash package 4": ("test_attention.py::test_flash_attn_package", standins.by_package_4),
    "dropout": ("test_attention.py::test_attention_dropout", functools.partial(attention_dropout.check, "fp16")),
    "attention of models": ("test_attention.py::test_attention_of_models", functools.partial(attention_models.check, "default", "bf16", "smoke")),
    "attention of models by flash": ("test_attention.py::test_attention_of_models", functools.partial(_or_refusal, attention_models.check, "flash", "bf16", "smoke")),
    "attention of models by package": ("test_attention.py::test_attention_of_models", functools.partial(standins.by_package, attention_models.check, "package", "fp16", "smoke")),
    "packed members": ("test_attention.py::test_packed_members", functools.partial(attention_packed.check, "mask")),
    "convolution halves": ("test_kernel_speed.py::test_convolution_halves", standins.halves),
    **{f"large {name}": ("test_kernels.py::test_sizes_of_models", functools.partial(standins.beyond, name)) for name in large_models.OPERATIONS},
    "fp8 recipes": ("test_kernels.py::test_fp8_recipes", functools.partial(standins.in_8_bits, fp8_recipes.check)),
    "graph in new processes": ("test_kernels.py::test_graph_in_new_processes", functools.partial(graph_processes.check, "fp32", 24)),
    "packed members by package": ("test_attention.py::test_packed_members", functools.partial(standins.by_package, attention_packed.check, "package")),
}  # fmt: skip
