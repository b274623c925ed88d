"""The mutants of checks in the shapes of models as a table, as in `kernel_table`. Nothing runs here."""

import kernel_changes
import kernel_standins as standins
import model_changes as changes
from kernel_table import SDPA, Mutant

MUTANTS: dict[str, Mutant] = {
    "masked attention has NaN in half tiles": ("attention of models", SDPA, changes.nan_in_half_tiles),
    "a batch gets one mask": ("attention of models", SDPA, changes.first_members_mask),
    "a mask of numbers is ignored": ("attention of models", SDPA, changes.ignores_additive_mask),
    "V as a view is read wrong": ("attention of models", SDPA, changes.reads_view_as_contiguous),
    "scores above 88 overflow": ("attention of models", SDPA, changes.overflows),
    "grouped queries read another group": ("attention of models", SDPA, changes.next_head_of_group),
    "a row without a key spoils its head": ("attention of models", SDPA, changes.keyless_row_spoils_all),
    "attention of models loses a row of dv": ("attention of models", SDPA, kernel_changes.bad_backward(2)),
    "flash refuses grouped heads": ("attention of models by flash", SDPA, changes.refuses_groups),
    "the package loses a row of dk of models": (
        "attention of models by package",
        (standins.PACKAGE, "flash_attn_func"),
        kernel_changes.bad_backward(1),
    ),
    "attention is plain for grouped heads": ("attention default", SDPA, changes.plain_for_groups),
    "a member of one token sees another": ("packed members", SDPA, changes.sees_the_member_before),
    "a pack with lone keys has NaN": (
        "packed members by package",
        (standins.PACKAGE, "flash_attn_varlen_func"),
        changes.lone_keys_have_no_gradient,
    ),
}
