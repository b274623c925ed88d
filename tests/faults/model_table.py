"""The mutants of checks in the shapes of models as a table, as in `kernel_table`. Nothing runs here."""

# ruff: noqa: E501 - a table of faults reads in rows
import torch
from torch.nn import functional

import kernel_changes
import kernel_standins as standins
import model_changes as changes
import model_standins
from kernel_table import SDPA, Mutant
from workloads import repeatability

CONV = {dims: (functional, f"conv{dims}d") for dims in (1, 2, 3)}
_WRAPS = kernel_changes.wraps(model_standins.SMALL)
FP8 = (torch, "_scaled_mm")
MUTANTS: dict[str, Mutant] = {
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
    "attention of models loses a row of dv": ("attention of models", SDPA, kernel_changes.bad_backward(2)),
    "flash refuses grouped heads": ("attention of models by flash", SDPA, changes.refuses_groups),
    "the package loses a row of dk of models": ("attention of models by package", (standins.PACKAGE, "flash_attn_func"), kernel_changes.bad_backward(1)),
    "conv1d zeroes a tile": ("convolution", CONV[1], kernel_changes.after(lambda out: out[..., -4:].zero_())),
    "conv3d loses a row of dw": ("convolution", CONV[3], kernel_changes.bad_backward(1)),
    "conv3d reads channels that are last as first": ("convolution", CONV[3], changes.reads_as_first),
    "conv3d changes bits between calls": ("convolution", CONV[3], changes.restless()),
    "half a convolution runs as float32 behind casts": (
        "convolution halves",
        (model_standins.Cost, "seconds"),
        lambda original, dtype: original(dtype) * (1 if dtype == torch.float32 else 2.1),
    ),
    "half a convolution is unfolded": (
        "convolution halves",
        (model_standins.Cost, "peak_bytes"),
        lambda original, dtype: original(dtype) * (1 if dtype == torch.float32 else 27),
    ),
    "mm is wrong if both operands are transposed": ("gemm", (torch, "mm"), changes.wrong_for_tt),
    "a product of a huge operand wraps": ("large product", (torch, "mm"), changes.wraps_operand),
    "a huge softmax wraps": ("large softmax", (torch.Tensor, "softmax"), kernel_changes.after(_WRAPS)),
    "a huge loss writes its gradient elsewhere": ("large cross_entropy", (functional, "cross_entropy"), changes.gradient(_WRAPS)),
    "a huge embedding wraps": ("large embedding", (functional, "embedding"), kernel_changes.after(_WRAPS)),
    "a huge table loses its last gradient": ("large embedding", (functional, "embedding"), kernel_changes.bad_backward(1)),
    "a huge convolution wraps": ("large convolution", CONV[2], kernel_changes.after(changes.wraps_images)),
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
