"""Reject ambiguous JSON: parsers disagree about duplicate keys, NaN and infinity.

In: bytes from a source that is not trusted. Out: nothing, or a ValueError.
"""

from __future__ import annotations

import json
import math
import re
from typing import NoReturn

# No other number is too large for a float, which holds 308 digits: those here have an exponent of three, or
# so many digits that one of two is enough. A number begins the text, or follows one of three characters.
_LARGE = re.compile(rb"(?:^|[:,[])\s*-?(?:[0-9]{200}|[0-9.]+[eE]\+?[0-9]{3})")


def check(text: bytes) -> None:
    """Refuse what is not strict JSON.

    Raises:
        ValueError: It is not strict JSON; JSONDecodeError and UnicodeDecodeError are subclasses.
        RecursionError: It is nested too deep.
    """
    # A call for each number takes as long as all the rest.
    finite = _finite if _LARGE.search(text) else None
    json.loads(text, parse_constant=_refuse_constant, parse_float=finite, object_pairs_hook=_unique)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not a finite number")
    return number


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("an object has a duplicate key")
    return members
