"""Compare versions as numbers, and match them against the patterns that compatibility rules are written in.

A pattern is `*`, a version (`7.2` is 7.2 and every patch of it, and is not 7.14), or comparisons joined by
commas (`>=7.0,<7.14`). On axes that are not versions it is an fnmatch pattern (`gfx9*`). In: text. Out:
answers.
"""

from __future__ import annotations

import operator
import re
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

VERSION_AXES = frozenset(
    (
        "rocm",
        "cuda",
        "torch",
        "python",
        "flash_attn",
        "triton",
        "torchvision",
        "torchaudio",
        "rccl",
        "nccl",
        "driver",
    )
)

_COMPARISON = re.compile(r"(>=|<=|==|!=|<|>)([0-9][0-9A-Za-z.]*)")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


@cache
def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: 7.14 is (7, 14), so 7.2 < 7.14 < 10.0; a local part says nothing."""
    return tuple(int(part[:12]) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0]))


def is_version(pattern: str) -> bool:
    """Whether a pattern names one version rather than a range."""
    return pattern[:1].isdigit()


@cache
def matches(axis: str, pattern: str, value: str) -> bool:
    """Whether a value of an axis fits a pattern."""
    if pattern == "*":
        return True
    if axis not in VERSION_AXES:
        return fnmatchcase(value, pattern)
    if is_version(pattern):
        wanted = numbers(pattern)
        return numbers(value)[: len(wanted)] == wanted
    return all(_compare(value, part.strip()) for part in pattern.split(","))


def _compare(value: str, comparison: str) -> bool:
    found = _COMPARISON.fullmatch(comparison)
    if found is None:
        return False
    left, right = numbers(value), numbers(found[2])
    length = max(len(left), len(right))
    return _OPERATORS[found[1]](_padded(left, length), _padded(right, length))


def _padded(parts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return parts + (0,) * (length - len(parts))


def is_pattern(axis: str, pattern: str) -> bool:
    """Whether text is a pattern that can be meant for an axis."""
    if axis not in VERSION_AXES or pattern == "*":
        return True
    if is_version(pattern):
        return re.fullmatch(r"[0-9]+(\.[0-9]+)*((a|b|rc|\.post)[0-9]+)?", pattern) is not None
    return all(_COMPARISON.fullmatch(part.strip()) for part in pattern.split(","))
