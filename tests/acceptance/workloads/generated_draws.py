"""What each family draws. In: a family, a seed, a number. Out: words, and calls with equal numbers.

Each case has its own source of numbers, so none depends on the cases before it.
"""

import random
from typing import Any

from workloads import (
    generated_attention,
    generated_jagged,
    generated_left,
    generated_operators,
    generated_optimizers,
    generated_sizes,
)
from workloads.generated_judge import Call

NEEDED = 4.0  # units of the judge that a healthy operator needs
# Of an operator's result, which has the roundings of all its kernels; each of these is judged by itself.
# A lost element is 100 units in bfloat16 and 800 in float16.
OPERATORS_NEED = {"float32": 256.0, "float16": 32.0, "bfloat16": 16.0}
ATTENTION_NEEDED = 8.0  # two softmaxes' worth of roundings, one of them in the gradient
FAMILIES = ("attention", "jagged", "modules", "operators", "optimizers", "sizes", "transformers")
OF_THEIR_OWN = ("noise", "torchao", "triton")  # these judge themselves, and are loaded when they are drawn
# Words, the calls with equal numbers (and what is special about each), and the units that they need.
Drawn = tuple[str, list[tuple[str, Call]], float]


def source(family: str, seed: int, number: int) -> random.Random:
    """The numbers that a case is drawn from."""
    return random.Random(f"{family} {seed} {number}")


def drawn(family: str, seed: int, number: int, sizes: str) -> Drawn | None:
    """A case of a family; `None` if it is left, and for what reason is said.

    Raises:
        ValueError: There is no such family.
    """
    if family not in FAMILIES:
        known = ", ".join(sorted((*FAMILIES, *OF_THEIR_OWN)))
        raise ValueError(f"got the family {family!r}, expected one of {known}")
    mixed, numbers = seed * 1_000_003 + number, source(family, seed, number)
    if family == "operators":
        case = generated_operators.draw(seed, number)
        forms = generated_operators.forms_of(case)
        return (str(case), forms, OPERATORS_NEED[case.dtype]) if forms else None
    if family in ("attention", "jagged"):
        its: Any = generated_attention if family == "attention" else generated_jagged
        call = its.made(its.draw(numbers, mixed % 2**31))
        return call.words, [("", call)], ATTENTION_NEEDED
    if family == "optimizers":
        return _stepped(numbers, seed, number, mixed)
    if family == "modules":
        from workloads import generated_modules  # only who draws them loads PyTorch's table

        return generated_modules.drawn(numbers, seed, number)
    if family == "transformers":
        from workloads import generated_transformers  # not every image has the package

        return generated_transformers.drawn(numbers, seed, number)
    return _sized(numbers, mixed, sizes)


def _stepped(numbers: random.Random, seed: int, number: int, mixed: int) -> Drawn | None:
    steps = generated_optimizers.draw(numbers, seed, number)
    if generated_optimizers.known(steps):
        generated_left.say(generated_left.CALL, "a known fault")
        return None
    call = generated_optimizers.made(steps, mixed)
    return str(steps), [("", call)], generated_optimizers.needed(steps)


def _sized(numbers: random.Random, mixed: int, sizes: str) -> Drawn | None:
    with generated_left.without_memory():
        words, call = generated_sizes.draw(numbers, mixed, sizes)
        return words, [("", call)], NEEDED * generated_sizes.more_units(call)
    return None
