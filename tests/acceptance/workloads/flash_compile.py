"""FlashAttention 4 compiled on a machine without a GPU. In: an architecture. Out: seconds.

The package documents the variables (`_get_device_arch` of flash_attn/cute/interface.py). Tensors are torch's
fake ones, which have a shape and a device and no memory: it compiles, and launches nothing.
"""

import time
from collections.abc import Mapping
from typing import Any

SMS = "132"  # of an H200; it decides how work is split, not whether it compiles
SHAPE = {"batch": 1, "length": 256, "heads": 8, "kv_heads": 2, "dim": 128}


def environment(arch: str) -> Mapping[str, str]:
    """What a process needs before it imports the package; `a`: with what this architecture alone has."""
    return {
        "FLASH_ATTENTION_ARCH": arch,
        "CUTE_DSL_ARCH": f"{arch}a",
        "FLASH_ATTENTION_NUM_SMS": SMS,
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "0",
    }


def compile_kernels() -> float:
    """Compile the causal forward and backward of grouped heads in bf16; the seconds that they took."""
    import torch
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd
    from torch._subclasses.fake_tensor import FakeTensorMode

    def tensor(heads: int) -> Any:
        return torch.empty(
            SHAPE["batch"], SHAPE["length"], heads, SHAPE["dim"], device="cuda", dtype=torch.bfloat16
        )

    began = time.perf_counter()
    with FakeTensorMode():
        q, k, v = (tensor(SHAPE[heads]) for heads in ("heads", "kv_heads", "kv_heads"))
        out, lse = _flash_attn_fwd(q, k, v, causal=True, return_lse=True)[:2]
        gradients = _flash_attn_bwd(q, k, v, out, torch.empty_like(out), lse, causal=True)
    assert [g.shape for g in gradients[:3]] == [q.shape, k.shape, v.shape], gradients
    return time.perf_counter() - began
