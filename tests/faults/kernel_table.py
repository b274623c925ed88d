"""The kernel mutants as a table: what each changes, and which check must catch it. Nothing runs here.

A mutant patches a function of torch, or of the stand-in for a package, from outside.
"""

# ruff: noqa: E501 - a table of faults reads in rows
from typing import Any

import torch
from torch.nn import functional

import kernel_changes as changes
import kernel_standins as standins
from kernel_changes import Mutate
from workloads import repeatability

SDPA = (functional, "scaled_dot_product_attention")
CONV = {dims: (functional, f"conv{dims}d") for dims in (1, 2, 3)}
FP8 = (torch, "_scaled_mm")
WRAPS = changes.wraps(standins.SMALL)
# name: (check, (owner, attribute), what it becomes)
Mutant = tuple[str, tuple[Any, str], Mutate]
MUTANTS: dict[str, Mutant] = {
    "mm drops the last K tile": ("gemm", (torch, "mm"), changes.short_product),
    "mm zeroes a tile": ("gemm", (torch, "mm"), changes.after(changes.zero_tile)),
    "mm flips one bit": ("gemm", (torch, "mm"), changes.after(changes.flip_bit)),
    "mm writes NaN": ("gemm", (torch, "mm"), changes.after(changes.put_nan)),
    "mm negates one element": ("gemm", (torch, "mm"), changes.after(changes.negate_one)),
    "mm writes past its output": ("gemm", (torch, "mm"), changes.write_beyond),
    "mm cuts float32 to TF32": ("gemm fp32", (torch, "mm"), changes.tf32_product),
    "mm is TF32 by default": ("gemm default", (torch, "mm"), changes.tf32_product),
    "bmm drops the last K tile": ("gemm", (torch, "bmm"), changes.short_product),
    "linear zeroes a tile": ("gemm", (functional, "linear"), changes.after(changes.zero_tile)),
    "linear loses a gradient row": ("gemm", (functional, "linear"), changes.bad_backward(0)),
    "addmm flips one bit": ("gemm", (torch, "addmm"), changes.after(changes.flip_bit)),
    "attention loses 8 keys": ("attention", SDPA, changes.with_keys(changes.lost_keys)),
    "attention swaps heads": ("attention", SDPA, changes.with_keys(changes.swapped_heads)),
    "attention's mask is off by one": ("attention", SDPA, changes.shifted_mask),
    "attention's scale is off": ("attention", SDPA, changes.wrong_scale),
    "attention zeroes a tile": ("attention", SDPA, changes.after(changes.zero_tile)),
    "attention writes NaN": ("attention", SDPA, changes.after(lambda out: out[..., -1, -1].fill_(float("nan")))),
    "attention loses a row of dq": ("attention", SDPA, changes.bad_backward(0)),
    "attention loses a row of dk": ("attention", SDPA, changes.bad_backward(1)),
    "attention loses a row of dv": ("attention", SDPA, changes.bad_backward(2)),
    "attention falls back in silence": ("attention backend", SDPA, changes.plain_attention),
    "rms_norm uses another epsilon": ("rms_norm", (functional, "rms_norm"), changes.other_eps),
    "rms_norm flips one bit": ("rms_norm", (functional, "rms_norm"), changes.after(changes.flip_bit)),
    "rms_norm loses a row of dx": ("rms_norm", (functional, "rms_norm"), changes.bad_backward(0)),
    "layer_norm uses another epsilon": ("layer_norm", (functional, "layer_norm"), changes.other_eps),
    "layer_norm loses a row of dx": ("layer_norm", (functional, "layer_norm"), changes.bad_backward(0)),
    "cross_entropy takes the next target": ("cross_entropy", (functional, "cross_entropy"), changes.next_target),
    "cross_entropy counts ignored rows": ("cross_entropy", (functional, "cross_entropy"), changes.counts_ignored),
    "cross_entropy loses a gradient row": ("cross_entropy", (functional, "cross_entropy"), changes.bad_backward(0)),
    "silu zeroes a tile": ("activations", (functional, "silu"), changes.after(lambda out: out[..., -4:].zero_())),
    "gelu is the other approximation": (
        "activations fp32",
        (functional, "gelu"),
        lambda original, x, **_: original(x, approximate="tanh" if x.dtype != torch.float64 else "none"),
    ),
    "softmax flips one bit": ("reductions", (torch.Tensor, "softmax"), changes.after(changes.flip_bit)),
    "cumsum drops the last term": ("reductions", (torch.Tensor, "cumsum"), changes.after(lambda o: o[..., -1].sub_(1))),
    "embedding learns its padding row": ("embedding", (functional, "embedding"), changes.no_padding),
    "embedding flips one bit": ("embedding", (functional, "embedding"), changes.after(changes.flip_bit)),
    "conv2d zeroes a tile": ("convolution", (functional, "conv2d"), changes.after(changes.zero_tile)),
    "AdamW forgets its decay": ("adamw", (torch.optim.AdamW, "__init__"), changes.no_decay),
    **{
        f"a cast to {dtype} cuts": ("fp8", (torch.Tensor, "to"), changes.truncated_fp8(dtype))
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    },
    "mm is corrupted now and then": ("screen", (torch, "mm"), changes.restless(3)),
    "attention is plain by default": ("attention default", SDPA, changes.plain_attention),
    "a group's result is corrupted": ("grouped", (torch, "_grouped_mm"), changes.after(changes.flip_bit)),
    "a graph breaks": ("compiled", (functional, "silu"), changes.breaks_graph),
    "mm changes bits between calls": ("determinism", (torch, "mm"), changes.restless(3)),
    "rms_norm changes bits between calls": ("graph", (functional, "rms_norm"), changes.restless(3)),
    "mm with TF32 flips one bit": ("gemm tf32", (torch, "mm"), changes.after(changes.flip_bit)),
    "mm gives the same wrong bits always": ("screen", (torch, "mm"), changes.after(changes.flip_bit)),
    "an 8-bit product flips one bit": ("fp8 product", FP8, changes.after(changes.flip_bit)),
    "an 8-bit product zeroes a tile": ("fp8 product", FP8, changes.after(changes.zero_tile)),
    "an 8-bit product writes NaN": ("fp8 product", FP8, changes.after(changes.put_nan)),
    "a huge addition wraps": ("large", (torch, "add"), changes.after(WRAPS)),
    "a huge product wraps": ("large", (torch, "mm"), changes.after(WRAPS)),
    "a huge loss forgets its last row": ("large", (functional, "cross_entropy"), changes.after(lambda out: out[-1].add_(1))),
    "a huge sum forgets its last term": ("large", (torch.Tensor, "sum"), changes.short_sum),
    "packed sequences see each other": ("varlen", SDPA, changes.ignores_mask),
    "packed attention loses a row of dk": ("varlen", SDPA, changes.bad_backward(1)),
    "a window is one key too wide": ("window", SDPA, changes.wider_mask),
    "a window is not there": ("window", SDPA, changes.ignores_mask),
    "the package's varlen zeroes a tile": ("varlen package", (standins.PACKAGE, "flash_attn_varlen_func"), changes.after(changes.zero_tile)),
    "the package's window is not there": (
        "window package",
        (standins.PACKAGE, "flash_attn_func"),
        lambda original, *args, **kwargs: original(*args, **{**kwargs, "window_size": (-1, -1)}),
    ),
    "the package loses a key": ("flash package", (standins.PACKAGE, "flash_attn_func"), changes.shifted_diagonal),
    "the package loses a row of dq": ("flash package", (standins.PACKAGE, "flash_attn_func"), changes.bad_backward(0)),
    "the package loses a row of dq of a rounded width": ("flash package rounded", (standins.PACKAGE, "flash_attn_func"), changes.bad_backward(0)),
    "the package changes bits between calls": (
        "flash package",
        (standins.PACKAGE, "flash_attn_func"),
        lambda original, *args, **kwargs: original(*args, **kwargs) * (1 + 0.01 * torch.rand(())),
    ),
    "FlashAttention 4 loses a row of dq": ("flash package 4", (standins.PACKAGE, "flash_attn_func"), changes.bad_backward(0)),
    "FlashAttention 4 zeroes a tile of a pack": ("flash package 4", (standins.PACKAGE, "flash_attn_varlen_func"), changes.after(changes.zero_tile)),
    "dropout does not scale what it keeps": ("dropout", SDPA, changes.unscaled_dropout),
    "dropout drops half of its share": ("dropout", SDPA, changes.half_the_dropout),
    "dropout has one mask for all heads": ("dropout", SDPA, changes.one_mask),
    "dropout has one mask for eight queries": ("dropout", SDPA, changes.one_mask_for_every_other_of_sixteen),
    "dropout is the same at every call": ("dropout", SDPA, changes.same_every_call),
    "dropout's backward forgets a row": ("dropout", SDPA, changes.bad_backward(2)),
    "a fused loss forgets a chunk": ("linear loss in chunks", (functional, "linear_cross_entropy"), changes.forgets_a_chunk),
    "a fused loss loses a row of dx": ("linear loss in chunks", (functional, "linear_cross_entropy"), changes.bad_backward(0)),
    "an output layer loses a row of dw": ("linear loss", (functional, "linear"), changes.bad_backward(1)),
    "a project's norm flips one bit": ("project kernels", (standins.OPS, "norm_apply"), changes.after(changes.flip_bit)),
    "a project's activation zeroes a tile": ("project kernels", (standins.OPS, "swiglu"), changes.after(changes.zero_tile)),
    "a project's loss is of the next label": (
        "project kernels",
        (standins.OPS, "cross_entropy_"),
        lambda original, logits, labels, scale: original(logits, (labels + 1) % logits.shape[1], scale),
    ),
    "masked attention has NaN in half tiles": ("attention of models", SDPA, changes.nan_in_half_tiles),
    "a lone query with far scores has NaN": ("attention of models", SDPA, changes.nan_for_lone_queries),
    "a float32 mask is read as half": ("attention of models", SDPA, changes.reads_wide_mask_as_half),
    "a batch gets one mask": ("attention of models", SDPA, changes.first_members_mask),
    "a mask of numbers is ignored": ("attention of models", SDPA, changes.ignores_additive_mask),
    "V as a view is read wrong": ("attention of models", SDPA, changes.reads_view_as_contiguous),
    "scores above 88 overflow": ("attention of models", SDPA, changes.overflows),
    "a mask that is all true is causal": ("attention of models", SDPA, changes.all_true_is_causal),
    "outlier channels are cut off": ("attention of models", SDPA, changes.clamps_outliers),
    "one key less than a tile is missed": ("attention of models", SDPA, changes.misses_the_last_key),
    "a tall and narrow product misses rows": ("gemm", (torch, "mm"), changes.misses_rows_of_a_tall),
    "grouped queries read another group": ("attention of models", SDPA, changes.next_head_of_group),
    "a row without a key spoils its head": ("attention of models", SDPA, changes.keyless_row_spoils_all),
    "attention of models loses a row of dv": ("attention of models", SDPA, changes.bad_backward(2)),
    "flash refuses grouped heads": ("attention of models by flash", SDPA, changes.refuses_groups),
    "the package loses a row of dk of models": ("attention of models by package", (standins.PACKAGE, "flash_attn_func"), changes.bad_backward(1)),
    "conv1d zeroes a tile": ("convolution", CONV[1], changes.after(lambda out: out[..., -4:].zero_())),
    "conv3d loses a row of dw": ("convolution", CONV[3], changes.bad_backward(1)),
    "conv3d reads channels that are last as first": ("convolution", CONV[3], changes.reads_as_first),
    "conv3d changes bits between calls": ("convolution", CONV[3], changes.restless(2)),
    "half a convolution runs as float32 behind casts": (
        "convolution halves",
        (standins.Cost, "seconds"),
        lambda original, dtype: original(dtype) * (1 if dtype == torch.float32 else 2.1),
    ),
    "half a convolution is unfolded": (
        "convolution halves",
        (standins.Cost, "peak_bytes"),
        lambda original, dtype: original(dtype) * (1 if dtype == torch.float32 else 27),
    ),
    "mm is wrong if both operands are transposed": ("gemm", (torch, "mm"), changes.wrong_for_tt),
    "a product of a huge operand wraps": ("large product", (torch, "mm"), changes.wraps_operand),
    "a huge softmax wraps": ("large softmax", (torch.Tensor, "softmax"), changes.after(WRAPS)),
    "a huge loss writes its gradient elsewhere": ("large cross_entropy", (functional, "cross_entropy"), changes.gradient(WRAPS)),
    "a huge embedding wraps": ("large embedding", (functional, "embedding"), changes.after(WRAPS)),
    "a huge table loses its last gradient": ("large embedding", (functional, "embedding"), changes.bad_backward(1)),
    "a huge convolution wraps": ("large convolution", CONV[2], changes.after(changes.wraps_images)),
    "an 8-bit product reads past its scales": ("fp8 recipes", FP8, changes.next_scale),
    "an 8-bit product reads past its last row": ("fp8 recipes", FP8, changes.row_beyond),
    "an 8-bit product has one scale for all rows": ("fp8 recipes", FP8, changes.first_scale),
    "a ragged 8-bit product zeroes its last row": ("fp8 recipes", FP8, changes.drops_ragged_row),
    "a replay now and then is corrupted": ("graph in new processes", (repeatability, "capture"), changes.corrupts_replays),
    "a replay has the inputs of the one before": ("graph in new processes", (repeatability, "capture"), changes.late_replays),
    "the package's window of a model is not there": (
        "attention of models by package",
        (standins.PACKAGE, "flash_attn_func"),
        lambda original, *args, **kwargs: original(*args, **{**kwargs, "window_size": (-1, -1)}),
    ),
    "attention is plain for grouped heads": ("attention default", SDPA, changes.plain_for_groups),
    "a member of one token sees another": ("packed members", SDPA, changes.sees_the_member_before),
    "a pack with lone keys has NaN": ("packed members by package", (standins.PACKAGE, "flash_attn_varlen_func"), changes.lone_keys_have_no_gradient),
}  # fmt: skip
