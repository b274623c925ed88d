"""What torch is known to get wrong where programs draw numbers. In: a case, its share, words. Out: the same.

Found by drawn random numbers, each confirmed by a plain program (docs/reference/trust.md).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from workloads import device, generated_compiled, generated_left

if TYPE_CHECKING:
    from workloads.generated_noise import Case

BUDGET = "by the partitioner"  # recomputed as a budget of memory says
SEED = "one seed gives two results"
OTHERS = "its numbers are not those of eager mode"
GRADIENT = "its gradient is not that of the numbers that forward drew"


def known(case: Case, share: float, words: str) -> tuple[float, str]:
    """What is said; what a healthy torch gets wrong is passed over, and counted."""
    turned = any(one != tuple(sorted(one)) for one in (case.order, case.turned))
    coded = case.way == generated_compiled.CODE and bool(case.recomputed)
    fault = "pytorch#174078" if words == OTHERS and turned else ""
    fault = "pytorch#190758" if case.recomputed == BUDGET else fault
    if words == GRADIENT and turned and case.noise == "rrelu" and coded:
        fault = fault or "RReLU of a turned operand"
    # Of a recomputed block no generated code draws these two, but another generator of the device.
    if words == SEED and case.noise in ("uniform_", "rrelu") and coded and device().type == "cuda":
        fault = fault or "drawn without the seed"
    if share > 1 and fault:
        generated_left.say("known", fault)
        share = 0.0
    return share, words
