"""What torch is known to get wrong of drawn modules, and what healthy ones need. In: a case. Out: see below.

Found by drawn modules, each confirmed by a plain program (docs/reference/trust.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads import generated_elsewhere, generated_modules_draws

if TYPE_CHECKING:
    from workloads.generated_modules import Case

NEEDED = {"float32": 16.0, "float16": 8.0, "bfloat16": 8.0}
ON_DEVICE = 3.0  # times that, of recurrent nets: cuDNN's needed up to twice as much on an H200
LOOSER = 2.0  # as in drawn operators a kernel's gate was measured, with their samples


def known(case: Case) -> bool:
    """Whether torch is known to be wrong in this case.

    By `is_causal` attention forgets the mask, and by its own one nothing sees the key that was added behind.
    Fractional pools work out places in their type.
    """
    own = case.own
    if own is None:
        return case.dtype != "float32" and case.name.startswith("nn.Fractional")
    added = own.made.get("add_bias_kv") or own.made.get("add_zero_attn")
    is_hint = own.given.get("mask") == generated_modules_draws.CAUSAL and not own.given["padding"]
    return bool(added and is_hint and not own.given["weights"])


def is_wrong_without_gradients(case: Case) -> bool:
    """Whether the fast path of encoders is known to be wrong, which needs an even number of heads.

    A mask of numbers gives NaN (pytorch#118628). On a device gelu is its approximation by tanh.
    """
    made, given = dict(case.made), dict(case.given)
    if case.name != "TransformerEncoder" or any(case.modes) or made["nhead"] % 2 or not made["batch_first"]:
        return False
    approximates = made["activation"] == "gelu" and generated_elsewhere.place() is not None
    return approximates or bool(given["mask"] == generated_modules_draws.FLOAT)


def needed(case: Case) -> float:
    """The units that a healthy module needs."""
    recurrent = case.name.removeprefix("nn.") in ("RNN", "GRU", "LSTM")
    return NEEDED[case.dtype] * (ON_DEVICE if recurrent and generated_elsewhere.place() else 1.0)
