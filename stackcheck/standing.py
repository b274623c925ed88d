"""Which of the verdicts on an image count now. Pure.

In: statements of one key, a moment, an age. Out: the PASSED verdicts that stand, or a `CertificateError`.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from stackcheck.errors import CertificateError
from stackcheck.statement import VSA, Statement, facts, newest, status, time_verified, withdrawn

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_AGE = dt.timedelta(days=30)
CLOCK_SKEW = dt.timedelta(minutes=10)


def standing(
    reference: str, statements: Sequence[Statement], now: dt.datetime, max_age: dt.timedelta
) -> list[Statement]:
    """The PASSED verdicts that count: within the age, and later than every withdrawal, lifted or not."""
    _check_newest(reference, newest(statements), now, max_age)
    passed = [item for item in statements if item.predicate_type == VSA and status(item) == "PASSED"]
    since = withdrawn(statements)
    return [
        item
        for item in passed
        if now - time_verified(item) <= max_age and (since is None or time_verified(item) >= since)
    ]


def _check_newest(reference: str, latest: Statement | None, now: dt.datetime, max_age: dt.timedelta) -> None:
    if latest is None:
        raise CertificateError(
            "there is no certificate signed with the pinned key",
            where=reference,
            next_step="name the publisher's public key: --key PATH",
        )
    if status(latest) != "PASSED":
        raise CertificateError(
            "the newest verdict on this image is FAILED",
            where=reference,
            got=f"{time_verified(latest).isoformat()}: {'; '.join(facts(latest).get('reasons', ()))}",
            next_step="take another image of this stack: stackcheck list",
        )
    if time_verified(latest) > now + CLOCK_SKEW:
        raise CertificateError(
            "the certificate is from the future", where=reference, got=time_verified(latest).isoformat()
        )
    if now - time_verified(latest) > max_age:
        raise CertificateError(
            "the certificate is too old",
            where=reference,
            got=f"{(now - time_verified(latest)).days} days",
            expected=f"at most {max_age}",
            next_step="certify it again, or accept older ones: --max-age",
        )
