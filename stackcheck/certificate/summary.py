"""The strict form of a verification summary (VSA) of this project.

In: the predicate of a signed statement. Out: nothing, or a ValueError that names the first wrong field. The
signature says who wrote it, not that it is well formed: null or a text where a list belongs must not reach
code that reads it. Unknown fields are allowed, so that later versions can say more.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, FiniteFloat, JsonValue, StringConstraints, ValidationError, model_validator

from stackcheck.files.border import Open, first_problem
from stackcheck.policy import Tier
from stackcheck.vendors import Vendor

CERTIFICATE_FIELD = "urn:stackcheck:certificate:v1"  # extension fields are named by URIs
CERTIFIED_LEVEL = "STACKCHECK_CERTIFIED"

Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Hex = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# RFC 3339 with a zone: times are compared.
Moment = Annotated[
    str, StringConstraints(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:\d\d)$")
]


class _Verifier(Open, strict=True):
    id: str


class _Digests(Open, strict=True):
    sha256: Hex


class _Evidence(Open, strict=True):
    digest: _Digests


class _Policy(Open, strict=True):
    uri: str


class _Device(Open, strict=True):
    model: str
    arch: str = ""
    firmware: str | None
    power_cap_w: float | None


class _Host(Open, strict=True):
    """The host of a run. No field has a default: renewals and nights compare each one with this host's."""

    vendor: Vendor
    devices: tuple[_Device, ...] = Field(min_length=1)
    driver: str | None
    kernel: str | None
    partition: str | None
    nvls: str | None


class _Run(Open, strict=True):
    id: str
    tier: Tier
    started: Moment


class _Waiver(Open, strict=True):
    check: str
    reason: str
    issue: str
    by: str
    until: str


class _KnownIssue(Open, strict=True):
    id: str
    symptom: str
    issue: str


class _Archs(Open, strict=True):
    staticOnly: tuple[str, ...] = ()  # noqa: N815  # as it is signed


class _PairedMetric(Open, strict=True):
    check: str
    name: str
    loss: float
    verdict: Literal["slower", "equal", "noisy"]


class _Against(Open, strict=True):
    """What a pair with a certified image found."""

    reference: str
    digest: Digest
    at: Moment
    driver: str | None = None
    runs: int
    metrics: tuple[_PairedMetric, ...] = Field(min_length=1)


class _DerivedFrom(Open, strict=True):
    """The certified image below, which checks ran here, and which are taken over from its certificate."""

    digest: Digest
    name: str
    statement: Digest
    verifiedAt: Moment  # noqa: N815
    layers: int
    paths: int
    names: tuple[str, ...]
    why: str
    ran: tuple[str, ...]
    carried: tuple[str, ...]


class _AllowedFiles(Open, strict=True):
    paths: str
    reason: str
    files: int
    digest: Digest


class _Files(Open, strict=True):
    """How the image's files compare with its packages' records."""

    owned: dict[str, int]
    byteCode: int  # noqa: N815
    privileged: tuple[str, ...]
    allowed: tuple[_AllowedFiles, ...]


class _Baseline(Open, strict=True):
    check: str
    name: str
    unit: str
    conditions: dict[str, JsonValue]
    direction: Literal["min", "max"]
    value: FiniteFloat
    statement: Digest


class _Python(Open, strict=True):
    """The Python of the image. Without a package, the one who certified accepted it by its digest."""

    file: str
    sha256: Digest
    package: str | None
    libraries: dict[str, Digest] = Field(default_factory=dict)


class _DriverWords(Open, strict=True):
    """What the documents say of the driver with this stack."""

    state: str = ""
    says: str = ""


class _Certificate(Open, strict=True):
    """What every summary states about image and host; a revocation states no more, and its reasons."""

    stackId: str | None  # noqa: N815
    name: str | None = None
    configDigest: Digest  # noqa: N815
    host: _Host
    experimental: bool
    notBefore: Moment | None = None  # noqa: N815
    lifts: tuple[Digest, ...] = ()
    reasons: tuple[str, ...] = ()


class _Passed(_Certificate):
    """What a summary must state before anybody relies on it."""

    run: _Run
    required: tuple[str, ...]
    passed: tuple[str, ...]
    warned: tuple[str, ...]
    waivers: tuple[_Waiver, ...]
    archs: _Archs = _Archs()
    bounds: dict[str, int] = Field(default_factory=dict)
    knownIssues: tuple[_KnownIssue, ...] = ()  # noqa: N815
    driver: _DriverWords = _DriverWords()
    python: _Python | None = None
    madeFrom: dict[str, str] = Field(default_factory=dict)  # noqa: N815
    against: _Against | None = None
    derivedFrom: _DerivedFrom | None = None  # noqa: N815
    files: _Files | None = None
    baselines: tuple[_Baseline, ...] = ()

    @model_validator(mode="after")
    def _not_slower(self) -> Self:
        slower = (
            [each.name for each in self.against.metrics if each.verdict == "slower"] if self.against else []
        )
        if slower:
            raise ValueError(f"PASSED, although a pair found it slower: {', '.join(slower)}")
        return self

    @model_validator(mode="after")
    def _taken_over(self) -> Self:
        found = self.derivedFrom
        if found and (both := set(found.ran).intersection(found.carried)):
            raise ValueError(f"taken over, although they ran: {', '.join(sorted(both))}")
        return self


class _Summary(Open, strict=True):
    verifier: _Verifier
    timeVerified: Moment  # noqa: N815
    resourceUri: str  # noqa: N815
    policy: _Policy
    inputAttestations: tuple[_Evidence, ...]  # noqa: N815
    verificationResult: Literal["PASSED", "FAILED"]  # noqa: N815
    verifiedLevels: tuple[str, ...]  # noqa: N815
    certificate: _Certificate = Field(alias=CERTIFICATE_FIELD)


class _PassedSummary(_Summary):
    certificate: _Passed = Field(alias=CERTIFICATE_FIELD)

    @model_validator(mode="after")
    def _levels(self) -> Self:
        needed = {CERTIFIED_LEVEL}
        tiers = {level for level in self.verifiedLevels if level.startswith("STACKCHECK_TIER_")}
        if tiers:  # older certificates state none
            needed |= tiers | {f"STACKCHECK_TIER_{self.certificate.run.tier.upper()}"}
        if len(tiers) > 1 or not needed <= set(self.verifiedLevels):
            raise ValueError(
                f"verifiedLevels: {', '.join(self.verifiedLevels) or 'none'}, not {', '.join(sorted(needed))}"
            )
        return self


def check(predicate: Mapping[str, Any]) -> None:
    """Raise a ValueError unless a predicate is a well-formed summary."""
    kind = _PassedSummary if predicate.get("verificationResult") == "PASSED" else _Summary
    try:
        # As JSON, where an array is a tuple, so that the types can be strict.
        kind.model_validate_json(json.dumps(predicate))
    except ValidationError as error:
        raise ValueError(first_problem(error)) from error
