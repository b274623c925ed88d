"""Durations and times that a user types. In: `30d`, `2026-11-01`. Out: a timedelta or an aware datetime."""

import datetime as dt
import re

from stackcheck.errors import ConfigurationError

_DURATION = re.compile(r"(?P<number>\d+)(?P<unit>[dhms])")
_DAYS = {"today": 0, "yesterday": 1}
_UNITS = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}


def duration(text: str, option: str) -> dt.timedelta:
    """The duration that an option names."""
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
        expected="a number and d, h, m or s, such as 30d; at most 999999999d",
    )


def since(text: str, option: str) -> dt.datetime:
    """The moment that an option names: a duration before now, `today`, `yesterday`, or an ISO time (UTC)."""
    try:
        if _DURATION.fullmatch(text):
            return dt.datetime.now(dt.UTC) - duration(text, option)
        if text in _DAYS:
            begin = dt.datetime.now(dt.UTC).replace(hour=0, minute=0, second=0, microsecond=0)
            return begin - dt.timedelta(days=_DAYS[text])
        found = dt.datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise ConfigurationError(
            "invalid time",
            where=option,
            got=text,
            expected="a number and d, h, m or s, such as 30d; today, yesterday; or a date such as 2026-11-01",
        ) from error
    return found if found.tzinfo else found.replace(tzinfo=dt.UTC)
