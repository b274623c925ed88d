"""Durations and times that a user types. In: `30d`, `2026-11-01`. Out: a timedelta or an aware datetime."""

from __future__ import annotations

import datetime as dt
import re

from stackcheck.errors import ConfigurationError

_DURATION = re.compile(r"(?P<number>\d+)(?P<unit>[dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}


def duration(text: str, option: str) -> dt.timedelta:
    """The duration that an option names.

    Raises:
        ConfigurationError: The text is not a duration.
    """
    match = _DURATION.fullmatch(text)
    try:
        if match:
            return dt.timedelta(**{_UNITS[match["unit"]]: int(match["number"])})
    except OverflowError:
        pass
    raise ConfigurationError(
        "invalid duration",
        where=option,
        got=text,
        expected="a number and d, h or m, such as 30d; at most 999999999d",
    )


def since(text: str, option: str) -> dt.datetime:
    """A duration before now, or an ISO date or time; without a zone it is UTC.

    Raises:
        ConfigurationError: The text is neither a duration, nor a date or time.
    """
    try:
        if _DURATION.fullmatch(text):
            return dt.datetime.now(dt.UTC) - duration(text, option)
        found = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            "invalid time",
            where=option,
            got=text,
            expected="a number and d, h or m, such as 30d; or a date such as 2026-11-01",
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)
