"""Reject ambiguous JSON: parsers disagree about duplicate keys, NaN and infinity.

In: bytes from a source that is not trusted. Out: nothing, or a ValueError.
"""

import json
import math
from typing import NoReturn


def check(text: bytes) -> None:
    """Refuse what is not strict JSON.

    Raises:
        ValueError: It is not strict JSON; JSONDecodeError and UnicodeDecodeError are subclasses.
        RecursionError: It is nested too deep.
    """
    json.loads(text, parse_constant=_refuse_constant, parse_float=_finite, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, object]]) -> None:
    """Nothing is kept of what was looked at."""
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object has a duplicate key")
