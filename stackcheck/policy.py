"""What a certificate requires. In: `policy:` of matrix.yaml. Out: a `Policy`: tier, advisory checks, waivers.

Every check of the certifying tier is required. An advisory check is reported and never decides; a waiver lets
one named check fail for named stacks until a date, and is signed into the certificate. A check with
parameters is named with them, so that an exception for one way hides no new fault in another.
"""

import datetime as dt  # pydantic reads annotations at run time
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from stackcheck.files.border import Closed
from stackcheck.vendors import Vendor

# `gate` is the part of all others that finds broken machines in a minute; it certifies nothing.
Tier = Literal["gate", "smoke", "standard", "soak"]
TIERS: tuple[Tier, ...] = ("gate", "smoke", "standard", "soak")
Certifying = Literal["smoke", "standard", "soak"]

_CHECK = re.compile(r"test_[a-z0-9_]+\.py::test_[a-z0-9_]+(\[[^\[\]]+\])?")
_WILDCARDS = "*?-"  # parameters are joined by `-`


def _check_name(text: str) -> str:
    if not _CHECK.fullmatch(text):
        message = "{text} is not a check: expected test_file.py::test_name or test_file.py::test_name[case]"
        raise PydanticCustomError("check", message, {"text": text})
    return text


def _some_cases(text: str) -> str:
    if "[" in text and not text.partition("[")[2].rstrip("]").strip(_WILDCARDS):
        message = "{text} is not a check: its parameters are wildcards alone, which cover every case"
        raise PydanticCustomError("check", message, {"text": text})
    return text


# A check by its id; `*` and `?` may stand for a part of its parameters: test_file.py::test_name[default-*].
CheckName = Annotated[str, AfterValidator(_check_name)]
Exempted = Annotated[CheckName, AfterValidator(_some_cases)]
Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=12, max_length=400)]
Link = Annotated[str, StringConstraints(pattern=r"^(https://\S+|[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+#[0-9]+)$")]


@functools.lru_cache(maxsize=8192)  # the verdicts on ten thousand nodes ask about the same few checks
def names(check: str, check_id: str) -> bool:
    """Whether `check` names the check of this id: it is the id, or its wildcards fit the id's parameters."""
    (wanted, _, cases), (name, _, case) = check.partition("["), check_id.partition("[")
    return name == wanted and fnmatchcase(case, cases)


def signed_names(check: str, check_id: str) -> bool:
    """`names` for a waiver in a certificate: older ones name a check without its parameters, and mean all."""
    return names(check, check_id) or check == check_id.partition("[")[0]


class Advisory(Closed):
    """A check that is reported and does not decide."""

    check: Exempted
    reason: Sentence


class ExpectedFailure(Closed):
    """A check that is known to fail for these stacks, and does decide: they are not certified.

    Attributes:
        stacks: Patterns on stack ids, or on the file-safe name of an image without a stack.
    """

    check: CheckName  # a check id. Of a check with parameters, wildcards may stand for them
    stacks: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: Sentence
    issue: Link  # where the fault is tracked: a URL, or OWNER/REPOSITORY#NUMBER

    def covers(self, check_id: str) -> bool:
        """Whether it is about the check of this id."""
        return names(self.check, check_id)

    def is_for(self, stack: str) -> bool:
        """Whether it names this stack."""
        return any(fnmatchcase(stack, pattern) for pattern in self.stacks)


class Waiver(ExpectedFailure):
    """A named exception: this check may fail for these stacks, until a date."""

    check: Exempted  # wildcards may stand for a part of its parameters, never for all
    by: Annotated[str, StringConstraints(strip_whitespace=True, min_length=2, max_length=80)]
    until: dt.date  # the last day on which it holds, UTC

    def words(self) -> str:
        """The waiver in one sentence, for the reader."""
        return f"{self.check} is waived by {self.by} until {self.until}: {self.reason} ({self.issue})"


class Unpackaged(Closed):
    """Files that an image may have although no package recorded them as they are; a certificate names them.

    Attributes:
        paths: Absolute paths; `*` stands for any part of one.
        stacks: Patterns on stack ids, or on the file-safe name of an image without a stack.
    """

    paths: Annotated[
        tuple[Annotated[str, StringConstraints(pattern=r"^/[^*?\[]+", max_length=300)], ...],
        Field(min_length=1),
    ]
    stacks: Annotated[tuple[str, ...], Field(min_length=1)]
    reason: Sentence  # where the files come from

    def covers(self, path: str) -> bool:
        """Whether it names this path."""
        return any(fnmatchcase(path, pattern) for pattern in self.paths)

    def is_for(self, stack: str) -> bool:
        """Whether it names this stack."""
        return any(fnmatchcase(stack, pattern) for pattern in self.stacks)


class Policy(Closed):
    """What certifies.

    Attributes:
        certifies: Vendor -> the tier whose checks a certificate requires. A run of a lower tier is `tested`.
        renew_after_days: A certificate that is older is renewed. `verify` accepts 30 days by default, so a
            renewal may fail for three weeks before users notice.
        revoke: Who takes a certificate back after a night's failures: `quorum N`, N different nodes; `auto`,
            one node; `report`, a person alone.
    """

    certifies: Mapping[Vendor, Certifying]
    advisory: tuple[Advisory, ...] = ()  # checks that do not decide, each with its reason
    waivers: tuple[Waiver, ...] = ()  # named exceptions
    expects_failures: tuple[ExpectedFailure, ...] = ()  # what is known to fail, and is not waived
    unpackaged: tuple[Unpackaged, ...] = ()  # files of images that no package has to vouch for
    renew_after_days: Annotated[int, Field(ge=1, le=30)] = 7
    revoke: Annotated[str, StringConstraints(pattern=r"^(report|auto|quorum [2-9])$")] = "quorum 2"

    @property
    def revoke_nodes(self) -> int | None:
        """How many nodes have to agree before a night revokes; None: none does, a person decides."""
        return (
            None if self.revoke == "report" else int(self.revoke.removeprefix("quorum ").replace("auto", "1"))
        )

    @property
    def renew_after(self) -> dt.timedelta:
        """The age at which a certificate is renewed, and up to which the result of a run is used again."""
        return dt.timedelta(days=self.renew_after_days)

    def waivers_for(self, stack: str, today: dt.date) -> tuple[Waiver, ...]:
        """The waivers that hold for a stack today, without those whose date has passed."""
        return tuple(waiver for waiver in self.waivers if waiver.is_for(stack) and today <= waiver.until)

    def problems(self, ids: Iterable[str]) -> Iterator[str]:
        """The exceptions that name no check of the suites; `ids` are all that the suites have."""
        known = sorted({*ids})
        checks = {f"advisory[{index}]": item.check for index, item in enumerate(self.advisory)}
        checks |= {f"waivers[{index}]": item.check for index, item in enumerate(self.waivers)}
        expected = enumerate(self.expects_failures)
        checks |= {f"expects_failures[{index}]": item.check for index, item in expected}
        for place, check in checks.items():
            if not any(names(check, name) for name in known):
                yield f"policy.{place}.check: {_unknown(check, known)}"

    def expired_for(self, stack: str, today: dt.date) -> tuple[Waiver, ...]:
        """The waivers of a stack whose date has passed; a verdict names them, because they no longer help."""
        return tuple(waiver for waiver in self.waivers if waiver.is_for(stack) and today > waiver.until)


def is_enough(tier: Tier, needed: Tier) -> bool:
    """Whether a run of `tier` contains every check of `needed`."""
    return TIERS.index(tier) >= TIERS.index(needed)


def is_advisory(check_id: str, advisory: Iterable[Advisory]) -> bool:
    """Whether a check does not decide."""
    return any(names(item.check, check_id) for item in advisory)


def _unknown(check: str, known: Sequence[str]) -> str:
    function = check.partition("[")[0]
    cases = [name.partition("[")[2].rstrip("]") for name in known if name.partition("[")[0] == function]
    if not cases:
        return f"the suites have no check {check}"
    if cases == [""]:
        return f"{function} has no parameters: leave out [{check.partition('[')[2]}"
    got = f"the suites have no {check}" if "[" in check else f"{check} has parameters"
    return f"{got}: name those that are meant, {function}[CASE] with CASE one of {', '.join(cases)}"
