"""What the suites measured: result.json (schema 1) in, a `RunResult` out, or an error; never half a result.

The file is written by tests/acceptance/harness inside an image that is not yet trusted, so it is read as
foreign input: size, depth, unknown keys, doubled keys and numbers that are not finite are all refused here.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    NonNegativeFloat,
    NonNegativeInt,
    ValidationError,
    model_validator,
)

from stackcheck.errors import ChecksFailedError
from stackcheck.files import strictjson
from stackcheck.files.regular import read_regular
from stackcheck.matrix.matrix import Tier
from stackcheck.vendors import Vendor

if TYPE_CHECKING:
    from pathlib import Path

SIZE_LIMIT_BYTES = 32 * 2**20  # a soak run of ten thousand checks stays under 10 MiB

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Finite = Annotated[FiniteFloat, Field(strict=True)]
NonNegative = Annotated[NonNegativeFloat, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

CheckOutcome = Literal["passed", "failed", "skipped", "error", "invalid"]
FailureCause = Literal["no_threshold"]
MetricVerdict = Literal["pass", "fail", "recorded", "no_threshold"]


class ResultError(ChecksFailedError):
    """A result file is missing, cut short, malformed or of another schema; that is never a pass."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ImageUnderTest(_Part):
    """The image that the suites ran in."""

    reference: Name
    config_digest: Digest
    manifest_digest: Digest | None


class Inputs(_Part):
    """Digests of what decided the run; the same four digests and image mean the same question was asked."""

    suites: Digest
    trainers: Digest
    thresholds: Digest
    matrix: Digest | None


class Device(_Part):
    """One accelerator as the vendor's management library shows it; the id is anonymised."""

    model: Name
    arch: str
    id: Name
    memory_bytes: NonNegativeInt
    power_cap_w: NonNegative | None = None
    firmware: str | None = None


class Host(_Part):
    """The machine of the run."""

    vendor: Vendor
    devices: tuple[Device, ...]
    driver: str | None
    kernel: str | None
    partition: str | None = None
    nvls: Literal["on", "off", "unavailable"] | None = None
    cpu: str | None = None
    memory_bytes: NonNegativeInt | None = None


class Selection(_Part):
    """What pytest was asked for, how many checks it was to run, and how many it left out.

    `deselected` are those of a later tier, and `dropped` those that anything else took out of this one; None
    in a result that does not say, which is never PASSED.
    """

    arguments: tuple[str, ...]
    collected: NonNegativeInt
    deselected: NonNegativeInt
    dropped: NonNegativeInt | None = None


class Metric(_Part):
    """One number with its unit, its bound, and what the bound said of it."""

    name: Name
    value: Finite | None
    unit: str
    repeats: tuple[Finite | None, ...] = ()
    conditions: dict[str, JsonValue] = Field(default_factory=dict)
    direction: Literal["min", "max"] | None = None
    bound: Finite | None = None
    ceiling: Finite | None = None
    source: str | None = None
    verdict: MetricVerdict


class Evidence(_Part):
    """The machine's state around a check: throttling, memory errors, other processes."""

    before: dict[str, JsonValue] = Field(default_factory=dict)
    after: dict[str, JsonValue] = Field(default_factory=dict)


class CheckResult(_Part):
    """One test item: how it ended and what it measured.

    `cause` is why a failed check failed, where a program has to know it: `no_threshold` if metrics without a
    threshold were its only failure, else None. Results of older suites do not have the field
    (`says_cause` is False).
    """

    id: Name
    outcome: CheckOutcome
    reason: str | None = None
    cause: FailureCause | None = None
    doc: str | None = None
    seconds: NonNegative
    devices: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    evidence: Evidence = Field(default_factory=Evidence)

    @property
    def says_cause(self) -> bool:
        """Whether the result file has the field `cause` for this check."""
        return "cause" in self.model_fields_set


class RunResult(_Part):
    """One run of the suites in one image on one host."""

    schema_: Literal[1] = Field(alias="schema")
    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    state: Literal["running", "finished", "crashed"]
    started: AwareDatetime
    finished: AwareDatetime | None
    tier: Tier
    stack_id: str | None
    image: ImageUnderTest | None
    inputs: Inputs
    host: Host
    software: dict[str, str | None]
    environment: dict[str, str]
    selection: Selection
    checks: tuple[CheckResult, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counts = Counter(check.id for check in self.checks)
        doubled = sorted(name for name, count in counts.items() if count > 1)
        if doubled:
            raise ValueError(f"a check is reported twice: {', '.join(doubled[:5])}")
        if self.state == "finished" and self.finished is None:
            raise ValueError("state is finished but finished is null")
        return self


def load(path: Path) -> RunResult:
    """Read a result file.

    Args:
        path: The result.json that a suite run left.

    Returns:
        The run, also one whose state is `running` or `crashed`: `verdict.judge` refuses those with a reason.

    Raises:
        ResultError: The file is missing, too large, cut short, not JSON, or not of schema 1.
    """
    return parse(read(path), where=str(path))


def parse(text: bytes, *, where: str = "result.json") -> RunResult:
    """The run that a result file's bytes describe; `where` names the file in errors."""
    try:
        strictjson.check(text)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ResultError(
            "the result file is not valid JSON, so the run says nothing",
            where=where,
            got=str(error) or type(error).__name__,
            expected="one complete JSON document with finite numbers",
            next_step="run the suites again: stackcheck test",
        ) from error
    try:
        return RunResult.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(
            "the result file is not a result of schema 1",
            where=where,
            got=_problems(error),
            expected="the fields of stackcheck/suite/result.schema.json",
            next_step="run the suites of this version of stackcheck: stackcheck test",
        ) from error


def json_schema() -> dict[str, object]:
    """The JSON Schema of result.json, as committed in stackcheck/suite/result.schema.json."""
    return RunResult.model_json_schema(by_alias=True)


def read(path: Path) -> bytes:
    """The bytes of a file that the image may have replaced: by a link to the host's own, or by a pipe."""
    try:
        text = read_regular(path, SIZE_LIMIT_BYTES + 1, follow=False)
    except OSError as error:
        raise ResultError(
            "the suites left no result",
            where=str(path),
            got=error.strerror,
            next_step="run the suites again: stackcheck test",
        ) from error
    if len(text) > SIZE_LIMIT_BYTES:
        raise ResultError(
            "the result file is too large to be one",
            where=str(path),
            expected=f"at most {SIZE_LIMIT_BYTES} bytes",
        )
    return text


def _problems(error: ValidationError) -> str:
    """The first few problems, each with its place; a wrong file can have thousands."""
    lines = [".".join(map(str, item["loc"])) + ": " + item["msg"] for item in error.errors(include_url=False)]
    more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more
