"""Stand-ins for what a CPU cannot run. In: a check's function. Out: its report, for the kernel mutants.

PyTorch's attention replaces the flash_attn package, the plain functions that test the trainers' Triton
kernels replace these kernels, and 2^16 elements replace 2^31; the 8-bit product is PyTorch's own for CPUs.
"""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch.nn import functional

from workloads import (
    arch,
    attention_masks,
    flash_package,
    fp8,
    large_tensors,
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


@contextlib.contextmanager
def package() -> Iterator[None]:
    """`import flash_attn` finds the stand-in."""
    with mock.patch.dict(sys.modules, {"flash_attn": PACKAGE}):
        yield


def _ops() -> ModuleType:
    path = trainers.FOLDER / "fused" / "ops.py"
    spec = importlib.util.spec_from_file_location("trainers_ops", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


OPS = _ops()


def flash_attn_package() -> dict[str, Any]:
    """As test_flash_attn_package judges it, with fewer repeats."""
    with package(), mock.patch.object(flash_package, "REPEATS", 2):
        return flash_package.check("bf16", "smoke")


def rounded_by_package() -> dict[str, Any]:
    """As test_flash_attn_package_head_dims judges it."""
    with package():
        return flash_package.check_rounded("bf16")


def packed_by_package() -> dict[str, Any]:
    """As test_varlen_attention judges the package."""
    with package():
        return attention_masks.packed("package")


def windowed_by_package() -> dict[str, Any]:
    """As test_sliding_window_attention judges the package."""
    with package():
        return attention_masks.windowed("package")


def trainers_kernels() -> dict[str, Any]:
    """As test_project_triton_kernels judges them."""
    with mock.patch.object(trainers, "module", return_value=OPS):
        return project_kernels.check()


def fp8_product() -> dict[str, Any]:
    """As test_fp8_gemm judges it on an architecture with 8-bit matrix units."""
    with mock.patch.object(arch, "fp8", return_value=torch.float8_e4m3fn):
        return fp8.check("smoke")


def beyond_the_limit() -> dict[str, Any]:
    """As test_beyond_32_bits judges it."""
    return large_tensors.check(SMALL)


def screened() -> dict[str, Any]:
    """As test_no_silent_corruption judges one device."""
    found = repeatability.screen(0.05)
    wrong = [] if found["golden"] == found["expected"] else [f"checksum {found['golden']}"]
    return {"cases": [{"failures": [*found["differences"], *wrong]}]}
