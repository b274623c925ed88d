"""What others measured: a signed bundle of a run without identities. In: result.json. Out: a DSSE envelope.

Only what is on a list leaves the host: device models of devices.json, releases by their form, metrics and
conditions that the suites of this checkout know, numbers of four digits. `first_host.private` then looks for
the forms of identities, as in every file that is meant for others. A repository of results takes a bundle
whose text this checkout would have made, with a signature of a key that the repository trusts.
"""

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, FiniteFloat, ValidationError

from stackcheck.certificate import keyless, keys, statement
from stackcheck.certificate.keyless import Identities
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.signers import Signer
from stackcheck.engine.first_host import private
from stackcheck.errors import CertificateError, ChecksFailedError, ConfigurationError
from stackcheck.files.border import Closed
from stackcheck.files.regular import read_regular
from stackcheck.oci.documents import compact_json, sha256
from stackcheck.proof import thresholds
from stackcheck.suite import results
from stackcheck.suite.judgement import judge_file
from stackcheck.suite.results import RunResult

TYPE = "urn:stackcheck:contribution:v1"
END = ".contribution.json"
KEYS, IDENTITIES = "contributors.pub", "contributors.yaml"  # in a repository of results: who may contribute
LIMIT_BYTES = 2**20
VERSIONS = ("python", "torch", "triton", "numpy")
# Two or three short numbers and a known suffix: no address, serial number or date with a time has this form.
RELEASE = r"\d{1,4}(\.\d{1,4}){1,2}((a|b|rc|\.post)\d{1,2})?(\+(cpu|cu\d{2,3}|rocm\d\.\d(\.\d)?))?"
Release = Annotated[str, Field(pattern=rf"^{RELEASE}$")]
DIGITS = 4


class ContributedFigure(Closed, strict=True, allow_inf_nan=False):
    """One figure of a check that passed or failed by itself."""

    metric: str
    conditions: dict[str, str | int | float | bool | None]
    value: FiniteFloat
    unit: str


class Contribution(Closed, strict=True, allow_inf_nan=False):
    """All that a bundle says; the day is that of the run, and `suites` the digest of what measured."""

    model: str
    count: Annotated[int, Field(ge=1, le=64)]
    driver: Release | None
    versions: dict[Literal["python", "torch", "triton", "numpy"], Release]
    tier: Literal["smoke", "gate", "speed", "standard", "full", "soak"]
    suites: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
    day: Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\d$")]
    verdict: Literal["PASSED", "FAILED", "UNFIT"]
    checks: dict[Literal["passed", "failed", "skipped", "invalid", "error"], Annotated[int, Field(ge=0)]]
    figures: list[ContributedFigure]


@dataclass(frozen=True, kw_only=True)
class Contributors:
    """Who may contribute: the owners of keys, and identities that sign without one."""

    keys: Pinned | None = None
    identities: Identities | None = None

    def open(self, body: bytes, path: Path) -> statement.Envelope:
        """The statement in a bundle, if one of them signed it.

        Raises:
            CertificateError: Somebody else signed it, or nobody.
        """
        bundle = keyless.is_bundle(body)
        if bundle and self.identities:
            return keyless.open_bundle(body, self.identities)
        if self.keys and not bundle:
            return statement.open_envelope(body, self.keys)
        raise CertificateError(
            "nothing is named that could check this signature",
            where=str(path),
            got=f"a signature of {'an identity' if bundle else 'a key'}",
            expected=f"{IDENTITIES if bundle else KEYS} in the folder of --key",
            next_step="name a folder with the file, if its contributors may sign that way",
        )


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A bundle of a folder, whose signature and text were checked."""

    file: Path
    signer: str
    told: Contribution


def of_result(path: Path, root: Path) -> Contribution:
    """What may leave this host of a run, with this checkout's verdict.

    Raises:
        ConfigurationError: The file is no result of GPUs that devices.json knows.
    """
    result = results.load_result(path)
    models = {device.model for device in result.host.devices}
    if result.host.vendor == "cpu" or len(models) != 1:
        raise ConfigurationError(
            "only a run on GPUs of one model can be contributed",
            where=str(path),
            got=", ".join(sorted(models)) or "no device",
            next_step="run the suites on such a host: stackcheck test IMAGE --tier standard",
        )
    (model,) = models
    verdict = judge_file(path, root, None).verdict
    outcomes = [check.outcome for check in result.checks]
    found = {
        "model": model,
        "count": len(result.host.devices),
        "driver": _release(result.host.driver),
        "versions": {name: told for name in VERSIONS if (told := _release(result.software.get(name)))},
        "tier": result.tier,
        "suites": result.inputs.suites,
        "day": result.started.date().isoformat(),
        "verdict": verdict.status,
        "checks": {name: outcomes.count(name) for name in sorted(set(outcomes))},
        "figures": _allowed(_figures(result), model, root),
    }
    return Contribution.model_validate_json(json.dumps(private(found, ())))


def contributors(path: Path | None) -> Contributors:
    """Who may contribute: by a file of public keys, or by the files of both kinds in a folder.

    Raises:
        CertificateError: There is no such file.
        ConfigurationError: A file is wrong, or others can replace it.
    """
    if path is None or not path.is_dir():
        return Contributors(keys=keys.load_public(path))
    named, own = path / IDENTITIES, path / KEYS
    identities = keyless.load_identities(named) if named.exists() else None
    return Contributors(
        keys=keys.load_public(own) if own.exists() or identities is None else None, identities=identities
    )


def statement_of(told: Contribution) -> statement.Statement:
    """The in-toto statement that is signed for a bundle."""
    document = {
        "_type": statement.STATEMENT,
        "subject": [{"name": "suites", "digest": {"sha256": told.suites.removeprefix("sha256:")}}],
        "predicateType": TYPE,
        "predicate": told.model_dump(),
    }
    return statement.Statement(predicate_type=TYPE, payload=compact_json(document))


def sign(told: Contribution, key: Signer) -> bytes:
    """The envelope of a bundle."""
    return statement.sign(statement_of(told), key).body


def name_of(told: Contribution) -> str:
    """The file of a bundle: the same run has the same name."""
    return f"{told.model.lower()}-x{told.count}-{sha256(compact_json(told.model_dump()))[7:19]}{END}"


def read(path: Path, root: Path, trusted: Contributors) -> Bundle:
    """A bundle, if one of the contributors signed it and it says nothing that is not on the list.

    Raises:
        CertificateError: Somebody else signed it, or it is no bundle.
        ChecksFailedError: It says more than a bundle may, or a figure that the hardware cannot reach.
    """
    envelope = trusted.open(read_regular(path, LIMIT_BYTES), path)
    try:
        if envelope.statement.predicate_type != TYPE:
            raise ValueError(envelope.statement.predicate_type)
        told = Contribution.model_validate_json(json.dumps(envelope.statement.predicate))
    except (ValidationError, ValueError) as error:
        raise CertificateError(
            "this is not a contribution", where=str(path), got=str(error)[:300], expected=f"type {TYPE}"
        ) from error
    figures = [figure.model_dump() for figure in told.figures]
    if _allowed(figures, told.model, root) != figures or private(told.model_dump(), ()) != told.model_dump():
        raise ChecksFailedError(
            "a contribution has fields, conditions or figures that are not on the list of this checkout",
            where=str(path),
            expected="what `stackcheck contribute RESULT` writes",
            next_step="make it again with this version of stackcheck",
        )
    if path.name != name_of(told):
        raise ChecksFailedError("a contribution has another name", where=str(path), expected=name_of(told))
    return Bundle(file=path, signer=envelope.signer, told=told)


def folder(path: Path, root: Path, trusted: Contributors | None = None) -> Iterator[Bundle]:
    """Every bundle of a folder; without further word the contributors are those that the folder names.

    Raises:
        CertificateError: One is not signed by a contributor.
        ChecksFailedError: One says more than it may; or the folder has no bundle.
    """
    files = sorted(path.glob(f"*{END}"))
    if not files:
        raise ChecksFailedError(
            "no contribution is there",
            where=str(path),
            expected=f"files *{END}",
            next_step="stackcheck contribute RESULT --to FOLDER",
        )
    trusted = trusted or contributors(path)
    yield from (read(file, root, trusted) for file in files)


def medians(bundles: Sequence[Bundle], model: str) -> dict[thresholds.Key, tuple[float, int]]:
    """What others measured on a model: metric and conditions -> median and the number of runs."""
    found: dict[thresholds.Key, list[float]] = {}
    for bundle in bundles:
        for figure in bundle.told.figures if bundle.told.model == model else ():
            key = figure.metric, json.dumps(figure.conditions, sort_keys=True)
            found.setdefault(key, []).append(figure.value)
    return {key: (statistics.median(values), len(values)) for key, values in found.items()}


def _release(text: str | None) -> str | None:
    return text if text and re.fullmatch(RELEASE, text) else None


def _figures(result: RunResult) -> list[dict[str, Any]]:
    return [
        {"metric": metric.name, "conditions": metric.conditions, "value": metric.value, "unit": metric.unit}
        for check in result.checks
        if check.outcome in {"passed", "failed"}
        for metric in check.metrics
        if metric.value is not None
    ]


def _allowed(figures: Sequence[Mapping[str, Any]], model: str, root: Path) -> list[dict[str, Any]]:
    """The figures that a check of this checkout compares with a bound, with the conditions that select it.

    A condition is a number, or a word that the committed thresholds have.
    """
    metrics, words = thresholds.ask_suites(root, model).metrics, _words(root)
    kept: dict[str, dict[str, Any]] = {}
    for figure in figures:
        rule = metrics.get(figure["metric"])
        if rule is None or figure["unit"] != rule.unit:
            continue
        given = {name: figure["conditions"][name] for name in rule.conditions if name in figure["conditions"]}
        if all(_known(name, value, words) for name, value in given.items()):
            value = float(f"{figure['value']:.{DIGITS}g}")
            one = {"metric": figure["metric"], "conditions": given, "value": value, "unit": rule.unit}
            kept[json.dumps([one["metric"], given], sort_keys=True)] = one
    asked = [(one["metric"], one["conditions"]) for one in kept.values()]
    answer = thresholds.ask_suites(root, model, figures=asked)
    return [
        one
        for one, reached, ceiling in zip(kept.values(), answer.reached, answer.ceilings, strict=True)
        if reached and _possible(one["value"], ceiling, metrics[one["metric"]].direction)
    ]


def _possible(value: float, ceiling: float | None, direction: str) -> bool:
    return value > 0 and (ceiling is None or direction == "max" or value <= ceiling)


def _known(name: str, value: object, words: frozenset[tuple[str, str]]) -> bool:
    if isinstance(value, str):
        return (name, value) in words
    return value is None or isinstance(value, bool) or (isinstance(value, int) and abs(value) < 2**40)


def _words(root: Path) -> frozenset[tuple[str, str]]:
    files = (root / "tests" / "acceptance" / "thresholds").glob("*/*.json")
    entries = (entry for file in files for entry in json.loads(file.read_bytes())["thresholds"])
    return frozenset(
        (name, value)
        for entry in entries
        for name, value in entry["conditions"].items()
        if isinstance(value, str)
    )
