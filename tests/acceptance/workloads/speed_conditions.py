"""What speed checks measure on GPUs. In: a metric and conditions.
Out: formats, shapes, sizes, and what is judged.

Pure: the lint of thresholds uses it too.
"""

from collections.abc import Mapping
from typing import Any

from workloads import attention_default, large_job

GEMM_DTYPES = ("bf16", "fp16", "tf32", "fp8")
# m, n, k: a cube for comparison with published figures, and the projections of an 8B Llama at 8192 tokens.
GEMM = ((8192, 8192, 8192), (16384, 8192, 4096), (8192, 28672, 4096), (4096, 4096, 4096))
COPY_BYTES = 4 << 30
ATTENTION_BACKENDS = ("flash", "cudnn")  # the default has the bound of the one that it is
ATTENTION_SEQUENCE = 8192
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
COLLECTIVE_BYTES = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30)
PLATEAU_BYTES = 4 << 30  # soak tier
GRAPHED_BYTES = 1 << 20  # up to this size launches take much of the time; a graph measures without them
LINK_BYTES = 256 << 20  # between two devices, and between a device and its host

_ATTENTION = [
    {"dtype": "bf16", "backend": backend, "causal": True, "sequence": ATTENTION_SEQUENCE}
    for backend in ATTENTION_BACKENDS
]
_BUSBW = [
    {"dtype": "bf16", "bytes": size} for size in (*COLLECTIVE_BYTES, PLATEAU_BYTES) if size > GRAPHED_BYTES
]
_LATENCY = [
    {"dtype": "bf16", "bytes": size, "graph": True} for size in COLLECTIVE_BYTES if size <= GRAPHED_BYTES
]
# The conditions under which each metric is judged, without those of the machine (devices, nvls).
CONDITIONS: Mapping[str, list[dict[str, Any]]] = {
    "gemm_tflops": [
        {"dtype": dtype, "m": m, "n": n, "k": k, "layout": "NT"} for dtype in GEMM_DTYPES for m, n, k in GEMM
    ],
    "copy_gb_per_s": [{"bytes": COPY_BYTES, "kind": "device"}],
    "attention_forward_tflops": _ATTENTION,
    "attention_backward_tflops": _ATTENTION,
    **{f"{op}_busbw": _BUSBW for op in COLLECTIVES},
    **{f"{op}_latency_us": _LATENCY for op in COLLECTIVES},
    "p2p_gb_per_s": [{"bytes": LINK_BYTES}],
    "h2d_gb_per_s": [{"bytes": LINK_BYTES}],
    "d2h_gb_per_s": [{"bytes": LINK_BYTES}],
    "train_tokens_per_s_per_gpu": [
        {
            "model": "llama",
            "size": "8b",
            "precision": "bf16",
            "seq": 8192,
            "devices": ranks,
            "micro_batch": samples,
        }
        for ranks in large_job.LARGE_RANKS
        for samples in large_job.LARGE_SAMPLES
    ],
    "train_fsdp2_tokens_per_s_per_gpu": [
        {
            "model": "llama",
            "size": "8b",
            "layers": large_job.FSDP2_LAYERS,
            "precision": "bf16",
            "seq": 8192,
            "devices": ranks,
            "micro_batch": large_job.FSDP2_SAMPLES,
        }
        for ranks in large_job.FSDP2_RANKS
    ],
}


def needs_soak(metric: str, conditions: Mapping[str, Any]) -> bool:
    """Whether only the soak tier measures the metric under these conditions."""
    return metric.endswith("_busbw") and conditions.get("bytes") == PLATEAU_BYTES


# Judged where a bound is known: not every model's stacks have this package.
_PACKAGE = [{"dtype": "bf16", "backend": "flash-attn-4", "causal": True, "sequence": ATTENTION_SEQUENCE}]
OPTIONAL_CHECK = "test_kernel_speed.py::test_flash_attention_4_speed"  # is skipped without the package
OPTIONAL: Mapping[str, list[dict[str, Any]]] = {
    "attention_forward_tflops": _PACKAGE,
    "attention_backward_tflops": _PACKAGE,
}


def is_optional(metric: str, conditions: Mapping[str, Any]) -> bool:
    """Whether only stacks with an optional package measure the metric under these conditions."""
    return any(conditions.get("backend") == known["backend"] for known in OPTIONAL.get(metric, ()))


def reaches(metric: str, conditions: Mapping[str, Any]) -> bool:
    """Whether some check measures the metric under these conditions."""
    judged = attention_default.judged_by(conditions)
    return any(
        all(value == known.get(key, value) for key, value in judged.items())
        for known in (*CONDITIONS.get(metric, ()), *OPTIONAL.get(metric, ()))
    )
