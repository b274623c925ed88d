"""JSON from hands that are not trusted: what parsers read in different ways, or half of them refuse, is none.

In: bytes. Out: nothing, or a ValueError: numbers that are not finite, and keys that an object names twice.
"""

from __future__ import annotations

import json
import math
from typing import NoReturn


def check(text: bytes) -> None:
    """Refuse what is no strict JSON.

    Raises:
        ValueError: It is none; JSONDecodeError and UnicodeDecodeError are such.
        RecursionError: It is nested too deep.
    """
    json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number that JSON has")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object names a key twice")
    return members
