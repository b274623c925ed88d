"""Read what the suites measured. In: result.json (schema 1). Out: a whole `RunResult`, or a `ResultError`.

tests/acceptance/harness writes the file inside an image that is not yet trusted. So it is read as foreign
input: too many bytes, too deep nesting, unknown or doubled keys, and numbers that are not finite are refused.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

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
    create_model,
    model_validator,
)

from stackcheck.errors import ChecksFailedError
from stackcheck.files import strictjson
from stackcheck.files.regular import read_regular
from stackcheck.policy import Tier
from stackcheck.vendors import Vendor

SIZE_LIMIT_BYTES = 32 * 2**20  # a soak run of ten thousand checks stays under 10 MiB

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Finite = Annotated[FiniteFloat, Field(strict=True)]
NonNegative = Annotated[NonNegativeFloat, Field(strict=True, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]

CheckOutcome = Literal["passed", "failed", "skipped", "error", "invalid"]
FailureCause = Literal["no_threshold", "bound", "exception", "time_limit"]
MetricVerdict = Literal["pass", "fail", "recorded", "no_threshold"]
# What can make a machine unfit; suite/machine.py says which readings show it.
UnfitKind = Literal[
    "throttled",
    "shared",
    "memory errors",
    "power cap",
    "clocks",
    "partition",
    "firmware",
    "link",
    "fabric",
    "recovery",
    "pcie",
    "driver fault",
    "short memory",
    "missing device",
    "nic",
    "gpudirect",
    "no answer",
]


class ResultError(ChecksFailedError):
    """A result file is missing, truncated, malformed or of a different schema. That is never a pass."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ImageUnderTest(_Part):
    """The image that the suites ran in."""

    reference: Name
    config_digest: Digest
    manifest_digest: Digest | None


class ReportedInputs(_Part):
    """Digests of what the run depended on, besides the image."""

    suites: Digest
    trainers: Digest
    thresholds: Digest
    matrix: Digest | None
    runner: Digest | None = None


class ReportedDevice(_Part):
    """One accelerator, as the vendor's management library describes it; `id` is a hash of its UUID."""

    model: Name
    arch: str
    id: Name
    memory_bytes: NonNegativeInt
    power_cap_w: NonNegative | None = None
    firmware: str | None = None


class ReportedHost(_Part):
    """The machine of the run, as the image reports it; `vendors.Host` is what this host sees itself."""

    vendor: Vendor
    devices: tuple[ReportedDevice, ...]
    driver: str | None
    kernel: str | None
    partition: str | None = None
    nvls: Literal["on", "off", "unavailable"] | None = None
    cpu: str | None = None
    memory_bytes: NonNegativeInt | None = None


class ReportedInterpreter(_Part):
    """The Python that ran the suites: its path, its file, that file's digest, the package that owns it.

    If `package` is null, the person who certified accepted the digests of the file and of each of
    `libraries`.
    """

    path: Name
    file: Name
    sha256: Digest
    package: str | None
    libraries: dict[str, Digest] = Field(default_factory=dict)


class Selection(_Part):
    """pytest's arguments, how many checks it selected, and how many it left out.

    `deselected` counts the checks of a later tier, `dropped` those of this tier that anything else left out.
    If `dropped` is `None`, the result does not say, and its verdict is never PASSED.
    """

    arguments: tuple[str, ...]
    collected: NonNegativeInt
    deselected: NonNegativeInt
    dropped: NonNegativeInt | None = None


class Metric(_Part):
    """One number with its unit, its bound and the verdict by that bound."""

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
    """The machine's state before and after a check: throttling, memory errors, other processes."""

    before: dict[str, JsonValue] = Field(default_factory=dict)
    after: dict[str, JsonValue] = Field(default_factory=dict)


class MachineFinding(_Part):
    """A state of the machine that an invalid check names; the readings in its evidence have to show it."""

    kind: UnfitKind
    words: str
    device: NonNegativeInt | None = None


class CheckResult(_Part):
    """One test item: how it ended and what it measured.

    `seconds` does not count `waited_s`, the time for which it waited for devices or for other checks.
    `cause` is `no_threshold` if missing thresholds are all that failed, `bound` if violated ones are,
    `time_limit` if the clock ended it, `exception` if the suites raised one and judged nothing, else None.
    """

    id: Name
    outcome: CheckOutcome
    reason: str | None = None
    cause: FailureCause | None = None
    doc: str | None = None
    skip: dict[str, JsonValue] | None = None
    machine: tuple[MachineFinding, ...] = ()
    started: AwareDatetime | None = None
    seconds: NonNegative
    waited_s: NonNegative = 0.0
    devices: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    evidence: Evidence = Field(default_factory=Evidence)


class RunResult(_Part):
    """One run of the suites in one image on one host.

    `host` repeats what this host passed to the suites; `seen_devices` has the ids of the devices that they
    found. `made_up` marks a file of this project's tests, in which checks pass that no device ran.
    """

    schema_: Literal[1] = Field(alias="schema")
    run_id: Annotated[str, Field(pattern=r"^[0-9a-f]{8,64}$")]
    state: Literal["running", "finished", "crashed"]
    started: AwareDatetime
    finished: AwareDatetime | None
    tier: Tier
    stack_id: str | None
    image: ImageUnderTest | None
    inputs: ReportedInputs
    host: ReportedHost
    seen_devices: tuple[str, ...] | None = None
    interpreter: ReportedInterpreter | None = None
    software: dict[str, str | None]
    environment: dict[str, str]
    selection: Selection
    checks: tuple[CheckResult, ...]
    made_up: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        counts = Counter(check.id for check in self.checks)
        doubled = sorted(name for name, count in counts.items() if count > 1)
        if doubled:
            raise ValueError(f"a check is reported twice: {', '.join(doubled[:5])}")
        if self.state == "finished" and self.finished is None:
            raise ValueError("state is finished but finished is null")
        return self


class _Unread(BaseModel):
    """A JSON object that stays unread."""

    model_config = ConfigDict(strict=True, frozen=True)


_EVIDENCE = create_model("_EVIDENCE", __base__=_Part, before=(_Unread, _Unread()), after=(_Unread, _Unread()))
_CHECK = create_model("_CHECK", __base__=CheckResult, evidence=(_EVIDENCE, _EVIDENCE()))
_RUN = create_model("_RUN", __base__=RunResult, checks=(tuple[_CHECK, ...], ...))


def load_result(path: Path) -> RunResult:
    """Read a result file.

    Returns:
        The run; its state may be `running` or `crashed`, which `verdict.judge` refuses with a reason.

    Raises:
        ResultError: The file is missing, too large, truncated, not JSON, or not of schema 1.
    """
    return parse(read_result_file(path), where=str(path))


def parse(text: bytes, *, where: str = "result.json") -> RunResult:
    """The run that the bytes of a result file describe; errors name the file as `where`.

    Raises:
        ResultError: The bytes are not JSON, or not of schema 1.
    """
    _require_strict(text, where)
    try:
        return RunResult.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(
            "the result file is not of schema 1",
            where=where,
            got=_problems(error),
            expected="the fields of stackcheck/suite/result.schema.json",
            next_step="run the suites of this version of stackcheck: stackcheck test",
        ) from error


def parse_to_judge(text: bytes, *, where: str, strict: bool) -> RunResult:
    """The same run for a verdict: without the machine's readings, half of the file, if no check is invalid.

    `strict` says that nobody outside the image has found the bytes to be strict JSON.

    Raises:
        ResultError: As `parse`.
    """
    if strict:
        _require_strict(text, where)
    try:
        run = _RUN.model_validate_json(text)
    except ValidationError:
        return parse(text, where=where)  # with the words of the whole schema
    return parse(text, where=where) if any(check.outcome == "invalid" for check in run.checks) else run


def _require_strict(text: bytes, where: str) -> None:
    try:
        strictjson.check(text)
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ResultError(
            "the result file is not valid JSON",
            where=where,
            got=str(error) or type(error).__name__,
            expected="one complete JSON document with finite numbers",
            next_step="run the suites again: stackcheck test",
        ) from error


def json_schema() -> dict[str, object]:
    """The JSON Schema of result.json, as committed in stackcheck/suite/result.schema.json."""
    return RunResult.model_json_schema(by_alias=True)


def read_result_file(path: Path, read: Callable[[Path, int], bytes] | None = None) -> bytes:
    """The bytes of a result file. The image may have put a link or a pipe in its place: those are refused.

    `read` gets the first bytes of the file from where it is stored; without it, from this disk.

    Raises:
        ResultError: There is no regular file, or it exceeds 32 MiB.
    """
    try:
        most = SIZE_LIMIT_BYTES + 1
        text = read(path, most) if read else read_regular(path, most, follow=False)
    except OSError as error:
        raise ResultError(
            "the result file cannot be read",
            where=str(path),
            got=error.strerror,
            expected="the result.json of a run, a regular file",
            next_step="check the path, or run the suites again: stackcheck test",
        ) from error
    if len(text) > SIZE_LIMIT_BYTES:
        raise ResultError(
            "the result file is too large",
            where=str(path),
            got=f"more than {SIZE_LIMIT_BYTES} bytes",
            expected=f"at most {SIZE_LIMIT_BYTES} bytes (32 MiB)",
            next_step="run the suites again: stackcheck test",
        )
    return text


def _problems(error: ValidationError) -> str:
    """The first five problems, each with its place; a wrong file can have thousands."""
    lines = [".".join(map(str, item["loc"])) + ": " + item["msg"] for item in error.errors(include_url=False)]
    more = f" (and {len(lines) - 5} more)" if len(lines) > 5 else ""
    return "; ".join(lines[:5]) + more
