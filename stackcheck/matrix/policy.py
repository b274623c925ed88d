"""What a certificate requires. In: `policy:` of matrix.yaml. Out: a `Policy`: tier, advisory checks, waivers.

Every check of the certifying tier is required. An advisory check is reported and never decides; a waiver lets
one named check fail for named stacks until a date, and is signed into the certificate.
"""

from __future__ import annotations

import datetime as dt  # pydantic reads annotations at run time
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from pydantic_core import PydanticCustomError

from stackcheck.vendors import Vendor

if TYPE_CHECKING:
    from collections.abc import Iterable

Tier = Literal["smoke", "standard", "soak"]
TIERS: tuple[Tier, ...] = ("smoke", "standard", "soak")

_CHECK = re.compile(r"test_[a-z0-9_]+\.py::test_[a-z0-9_]+(\[[^*?]+\])?")


def _check_name(text: str) -> str:
    if not _CHECK.fullmatch(text):
        message = "{text} is not a check: expected test_file.py::test_name or test_file.py::test_name[case]"
        raise PydanticCustomError("check", message, {"text": text})
    return text


# The name of a check covers all its parametrized cases; wildcards could cover checks that nobody thought of.
CheckName = Annotated[str, AfterValidator(_check_name)]
Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=12, max_length=400)]
Link = Annotated[str, StringConstraints(pattern=r"^(https://\S+|[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#[0-9]+)$")]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Advisory(_Part):
    """A check that is reported and does not decide."""

    check: CheckName
    reason: Sentence


class Waiver(_Part):
    """A named exception: this check may fail for these stacks, until a date.

    Attributes:
        check: A check id, or the function-level name that covers its cases. No wildcards.
        stacks: Patterns on stack ids, or on the file-safe name of an image without a stack.
        reason: Why the check may fail.
        issue: Where the fault is tracked: a URL, or OWNER/REPOSITORY#NUMBER.
        by: The person who answers for it.
        until: The last day on which it holds, UTC.
    """

    check: CheckName
    stacks: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: Sentence
    issue: Link
    by: Annotated[str, StringConstraints(strip_whitespace=True, min_length=2, max_length=80)]
    until: dt.date

    def covers(self, check_id: str) -> bool:
        """Whether a check id is this check or one of its cases."""
        return check_id == self.check or check_id.partition("[")[0] == self.check

    def words(self) -> str:
        """The waiver in one sentence, for the reader."""
        return f"{self.check} is waived by {self.by} until {self.until}: {self.reason} ({self.issue})"

    def is_for(self, stack: str) -> bool:
        """Whether the waiver names this stack."""
        return any(fnmatchcase(stack, pattern) for pattern in self.stacks)


class Policy(_Part):
    """What certifies.

    Attributes:
        certifies: Vendor -> the tier whose checks a certificate requires. A run of a lower tier is `tested`.
        advisory: Checks that do not decide, each with its reason.
        waivers: Named exceptions.
        renew_after_days: A certificate that is older is renewed. `verify` accepts 30 days by default, so a
            renewal may fail for three weeks before users notice.
    """

    certifies: Mapping[Vendor, Tier]
    advisory: tuple[Advisory, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    renew_after_days: Annotated[int, Field(ge=1, le=30)] = 7

    @property
    def renew_after(self) -> dt.timedelta:
        """The age at which a certificate is renewed, and up to which the result of a run is used again."""
        return dt.timedelta(days=self.renew_after_days)

    def waivers_for(self, stack: str, today: dt.date) -> tuple[Waiver, ...]:
        """The waivers that hold for a stack today, without those whose date has passed."""
        return tuple(waiver for waiver in self.waivers if waiver.is_for(stack) and today <= waiver.until)

    def expired_for(self, stack: str, today: dt.date) -> tuple[Waiver, ...]:
        """The waivers of a stack whose date has passed; a verdict names them, because they no longer help."""
        return tuple(waiver for waiver in self.waivers if waiver.is_for(stack) and today > waiver.until)


def is_enough(tier: Tier, needed: Tier) -> bool:
    """Whether a run of `tier` contains every check of `needed`."""
    return TIERS.index(tier) >= TIERS.index(needed)


def is_advisory(check_id: str, advisory: Iterable[Advisory]) -> bool:
    """Whether a check does not decide."""
    name = check_id.partition("[")[0]
    return any(item.check in {check_id, name} for item in advisory)
