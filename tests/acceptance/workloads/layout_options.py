"""What layouts of training can be asked for. In: nothing. Out: OPTIONS; the first of each is the plainest."""

from typing import Any

from workloads.layout_models import Layout

V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)  # whose backward passes are in two
SEVERAL = ("Interleaved1F1B", "LoopedBFS", *SPLIT)
REDUCED = ("float32", "float32", "float32", "bfloat16")  # the type in which gradients are summed
SHARDED = {"sync": ("each", "last"), "units": ("blocks", "root"), "reduce": REDUCED, "ignored": (False, True)}
DDP_ONLY: dict[str, tuple[Any, ...]] = {
    "bucket_cap_mb": (25, 0.001, 0.01, 1),
    "gradient_as_bucket_view": (False, True),
    "static_graph": (False, False, True),
    "find_unused_parameters": (False, True),
    "forward_sync_buffers": (True, False),
    "batched_grad_copy": (False, False, True),
    "skip_all_reduce_unused_params": (False, False, False, True),
    "bucket_cap_mb_list": (None, None, None, (0.001, 0.02)),
}
FSDP1_ONLY: dict[str, tuple[Any, ...]] = {
    "forward_prefetch": (False, True),
    "limit_all_gathers": (True, False),
    "use_orig_params": (True, False),
    "sync_module_states": (False, True),
}
OFFLOAD = ("", "pageable", "pinned")  # to the host's memory
FSDP2_ONLY: dict[str, tuple[Any, ...]] = {
    "reshard_after_forward": (True, False), "reshard_after_backward": (True, False),
    "prefetch": (False, True), "force_sum": (False, False, True), "unused": (False, True),
    "offload": ("", *OFFLOAD), "divided": ("", "", "by ranks", "by caller"),
    "output": ("", "float32"), "cast_forward_inputs": (True, False), "ahead": (False, True),
    "in_flight": (1, 1, 3),
}  # fmt: skip
PIPELINE: dict[str, tuple[Any, ...]] = {
    "schedule": ("GPipe", "1F1B", *SEVERAL),
    "stages": (1, 2, 3),  # of each rank
    "loss": ("mean", "sum", "share"),  # each pass's mean, the sum of all, or its share of the mean of all
    "given": (False, True),  # the shapes between stages, which else are found by one pass more
}
OPTIONS: dict[str, dict[str, tuple[Any, ...]]] = {
    "alone": {},
    "ddp": {
        "sync": ("each", "last", "later"),  # later: each in the first step, then the last
        "reduce": (*REDUCED[:3], "float16"),
        "hook": (False, True),
        "zero": ("", "", "copies", "views"),
        **DDP_ONLY,
    },
    "fsdp1": {
        **SHARDED,
        "units": ("blocks", "root", "size"),
        "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
        "backward_prefetch": ("BACKWARD_PRE", "BACKWARD_POST", ""),
        "offload": (False, False, True),
        **FSDP1_ONLY,
    },
    "fsdp2": {
        **SHARDED,
        "sync": ("each", "last", "scatter"),
        "replicas": (False, True),
        "placement": (False, True),
        **FSDP2_ONLY,
    },
    "tensor": {"sequence": (False, True)},
    "fsdp2+tensor": {**SHARDED, "sequence": (False, True), **FSDP2_ONLY},
    "pipeline": PIPELINE,
    "fsdp2+pipeline": {
        **PIPELINE,
        "units": ("blocks", "root"),
        "reduce": REDUCED,
        "reshard_after_forward": (True, False),
    },
}


def compiled_whole(layout: Layout) -> bool:
    """Whether all of the model is compiled, if anything is; else each block."""
    return layout.parallel == "ddp" and layout["bucket_cap_mb"] >= 1 and not layout["bucket_cap_mb_list"]


def groups_of(layout: Layout, size: int) -> int:
    """How many ranks, or groups of ranks, have data of their own."""
    if layout.parallel == "alone":
        return 1
    inner = "tensor" in layout.parallel or "pipeline" in layout.parallel
    return size // (layout["inner"] or size) if inner else size
