"""Stand-ins for what a CPU cannot run. In: a check's function. Out: its report, for the kernel mutants.

PyTorch's attention replaces the flash_attn package, the plain functions that test the trainers' Triton
kernels replace these kernels, and 2^16 elements replace 2^31; the 8-bit product is PyTorch's own for CPUs.
"""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from workloads import (
    arch,
    attention_masks,
    convolution_halves,
    flash_package,
    large_models,
    project_kernels,
    repeatability,
    trainers,
)

SMALL = 1 << 16


def _flash_attn_func(q: Any, k: Any, v: Any, *, causal: bool, **options: Any) -> torch.Tensor:
    left = options.get("window_size", (-1, -1))[0]
    sq, sk = q.shape[1], k.shape[1]
    seen = torch.ones(sq, sk, dtype=torch.bool)
    seen = seen.tril(sk - sq) if causal else seen  # the package's diagonal is at the bottom right
    seen = seen.triu(-left) if left >= 0 else seen
    rows = (tensor.transpose(1, 2) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(*rows, attn_mask=seen, enable_gqa=q.shape[2] != k.shape[2])
    return out.transpose(1, 2)


def _flash_attn_varlen_func(
    q: Any, k: Any, v: Any, ends: Any, key_ends: Any, *_rest: Any, causal: bool
) -> torch.Tensor:
    owner, key_owner = (
        torch.repeat_interleave(torch.arange(len(each) - 1), each.diff()) for each in (ends, key_ends)
    )
    seen = owner[:, None] == key_owner
    rows = (tensor.transpose(0, 1) for tensor in (q, k, v))
    out = functional.scaled_dot_product_attention(*rows, attn_mask=seen.tril() if causal else seen)
    return out.transpose(0, 1)


PACKAGE = ModuleType("flash_attn")
PACKAGE.flash_attn_func = _flash_attn_func  # type: ignore[attr-defined]
PACKAGE.flash_attn_varlen_func = _flash_attn_varlen_func  # type: ignore[attr-defined]


def _flash_attn_4_func(q: Any, k: Any, v: Any, **options: Any) -> tuple[torch.Tensor, None]:
    return PACKAGE.flash_attn_func(q, k, v, **options), None


def _flash_attn_4_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    qv: Any = None,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
) -> tuple[torch.Tensor, None]:
    assert qv is None
    ends = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return PACKAGE.flash_attn_varlen_func(q, k, v, *ends, causal=causal), None


# FlashAttention 4: a folder around `cute`, whose functions return a pair and take where members end by name.
CUTE = ModuleType("flash_attn.cute")
CUTE.flash_attn_func = _flash_attn_4_func  # type: ignore[attr-defined]
CUTE.flash_attn_varlen_func = _flash_attn_4_varlen_func  # type: ignore[attr-defined]


def by_package_4() -> dict[str, Any]:
    """As the checks of the package, its packs and its windows judge FlashAttention 4, in one report."""
    modules = {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": CUTE}
    with mock.patch.dict(sys.modules, modules), mock.patch.object(flash_package, "REPEATS", 2):
        reports = (
            flash_package.check("bf16", "smoke"),
            attention_masks.packed("package"),
            attention_masks.windowed("package"),
        )
    return {"cases": [case for report in reports for case in report["cases"]]}


def _ops() -> ModuleType:
    path = trainers.FOLDER / "fused" / "ops.py"
    spec = importlib.util.spec_from_file_location("trainers_ops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPS = _ops()


def by_package(check: Callable[..., dict[str, Any]], *words: str) -> dict[str, Any]:
    """A check of the package, with fewer repeats."""
    with (
        mock.patch.dict(sys.modules, {"flash_attn": PACKAGE}),
        mock.patch.object(flash_package, "REPEATS", 2),
    ):
        return check(*words)


def trainers_kernels() -> dict[str, Any]:
    """As test_project_triton_kernels judges them."""
    with mock.patch.object(trainers, "module", return_value=OPS):
        return project_kernels.check()


def in_8_bits(check: Callable[..., dict[str, Any]], *words: str) -> dict[str, Any]:
    """A check on an architecture with 8-bit matrix units."""
    with mock.patch.object(arch, "fp8", return_value=torch.float8_e4m3fn):
        return check(*words)


def screened() -> dict[str, Any]:
    """As test_no_silent_corruption judges one device."""
    found = repeatability.screen(0.05)
    wrong = [] if found["golden"] == found["expected"] else [f"checksum {found['golden']}"]
    return {"cases": [{"failures": [*found["differences"], *wrong]}]}


class Cost:
    """What a healthy convolution costs: halves take half of the time and of the memory."""

    @staticmethod
    def seconds(dtype: torch.dtype) -> float:
        return dtype.itemsize * 1e-3

    @staticmethod
    def peak_bytes(dtype: torch.dtype) -> float:
        return dtype.itemsize * 1e6


def halves() -> dict[str, Any]:
    """As test_convolution_halves judges them."""

    def cost(_problem: object, _layout: object, dtype: torch.dtype) -> tuple[float, float]:
        return Cost.seconds(dtype), Cost.peak_bytes(dtype)

    with mock.patch.object(convolution_halves, "_cost", cost):
        return convolution_halves.check("bf16")


def beyond(operation: str) -> dict[str, Any]:
    """As test_sizes_of_models judges it, with a limit and pieces of a CPU."""
    with mock.patch.object(large_models, "PIECE", SMALL // 4):
        return large_models.check(operation, SMALL)
