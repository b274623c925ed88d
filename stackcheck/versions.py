"""Compare versions as numbers, and match them against the patterns that compatibility rules are written in.

A pattern is `*`, a version (`7.2` is 7.2 and every patch of it, and is not 7.14), or comparisons joined by
commas (`>=7.0,<7.14`). On axes that are not versions it is an fnmatch pattern (`gfx9*`). In: text. Out:
answers.
"""

import operator
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import lru_cache

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
        "torchao",
        "transformers",
        "amdsmi",
        "rccl",
        "nccl",
        "driver",
    )
)

_VERSION = r"[0-9]+(?:\.[0-9]+)*(?:(?:a|b|rc|\.post)[0-9]+)?"
_COMPARISON = re.compile(rf"(>=|<=|==|!=|<|>)({_VERSION})")
_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


@lru_cache(maxsize=10_000)
def numbers(version: str) -> tuple[int, ...]:
    """The numbers of a version: 7.14 is (7, 14), so 7.2 < 7.14 < 10.0; a local part does not count."""
    return tuple(int(part[:12]) for part in re.findall(r"\d+", version.split("+", maxsplit=1)[0]))


def is_version(pattern: str) -> bool:
    """Whether a pattern names one version rather than a range."""
    return pattern[:1].isdigit()


def matches(axis: str, pattern: str, value: str) -> bool:
    """Whether a value of an axis fits a pattern."""
    return matcher(axis, pattern)(value)


@lru_cache(maxsize=10_000)
def matcher(axis: str, pattern: str) -> Callable[[str], bool]:
    """A function that says whether a value of this axis matches the pattern."""
    if pattern == "*":
        return lambda _: True
    if axis not in VERSION_AXES:
        return lambda value: fnmatchcase(value, pattern)
    if is_version(pattern):
        wanted = numbers(pattern)
        return lambda value: numbers(value)[: len(wanted)] == wanted
    comparisons = [_comparison(part.strip()) for part in pattern.split(",")]
    return lambda value: all(holds(value) for holds in comparisons)


def _comparison(text: str) -> Callable[[str], bool]:
    found = _COMPARISON.fullmatch(text)
    if found is None:
        return lambda _: False
    holds, bound = _OPERATORS[found[1]], numbers(found[2])

    def compared(value: str) -> bool:
        given = numbers(value)
        length = max(len(given), len(bound))
        return holds(_padded(given, length), _padded(bound, length))

    return compared


def _padded(parts: tuple[int, ...], length: int) -> tuple[int, ...]:
    return parts + (0,) * (length - len(parts))


def is_pattern(axis: str, pattern: str) -> bool:
    """Whether text is a pattern that can be meant for an axis."""
    if pattern == "*":
        return True
    if axis not in VERSION_AXES:
        return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._+*?!\[\]-]*", pattern) is not None
    if is_version(pattern):
        return re.fullmatch(_VERSION, pattern) is not None
    return all(_COMPARISON.fullmatch(part.strip()) for part in pattern.split(","))
