"""The consumer's verbs: verify, pull, sbom. In: a reference. Out: facts, or exit 7 with the reason."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from stackcheck import vendors
from stackcheck.certificate import key_sources, keyring
from stackcheck.certificate.for_host import Wanted
from stackcheck.certificate.keyring import Pinned
from stackcheck.cli import options as opt
from stackcheck.cli.options import duration
from stackcheck.cli.output import (
    Progress,
    counted,
    print_facts,
    print_json,
    print_note,
    print_styled,
    print_table,
)
from stackcheck.errors import ConfigurationError
from stackcheck.policy import Certifying as TierName

if TYPE_CHECKING:
    from stackcheck.certificate.verify import Verified

app = opt.new_app()

AUTO = "auto"
NONE = "none"

MaxAge = Annotated[str, opt.option("--max-age DURATION", "Largest age of the verdict: 30d, 12h or 45m.")]
Model = Annotated[
    str, opt.option("--device-model MODEL", "Device model to verify for; `auto` is this host's model.")
]
Driver = Annotated[
    str,
    opt.option(
        "--driver VERSION",
        "Driver to verify for; `auto` is this host's driver, `none` is a host without a GPU.",
    ),
]
Devices = Annotated[
    int | None,
    opt.option(
        "--devices",
        "How many devices must have been tested together.",
        "this host's, or 1 for a model that is named",
        min=1,
    ),
]
NoWaivers = Annotated[
    bool, opt.option("--no-waivers", "Refuse a certificate in which a waiver accepts a failed check.")
]
LowestTier = Annotated[
    TierName | None, opt.option("--tier", "Lowest tier to accept.", "standard for GPUs, smoke for processors")
]


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What the options of `verify`, `pull` and `run` ask of a certificate; `devices` as it was typed."""

    devices: int | None
    wanted: Wanted
    public_key: Pinned
    max_age: dt.timedelta
    plain_http: bool


def _conditions(
    *,
    devices: Devices = None,
    no_waivers: NoWaivers = False,
    packaged_python: opt.PackagedPython = False,
    tier: LowestTier = None,
    max_age: MaxAge = "30d",
    device_model: Model = AUTO,
    driver: Driver = AUTO,
    key: opt.PublicKey = None,
    plain_http: opt.PlainHttp = False,
) -> Conditions:
    """The conditions that these options state; `auto` stands for this host."""
    public_key = key_sources.public(key)
    oldest = duration(max_age, "--max-age")
    model, version, count = machine(device_model, driver, devices)
    return Conditions(
        devices=devices,
        wanted=Wanted(
            device_model=model,
            driver=version,
            devices=count,
            tier=tier,
            waivers=not no_waivers,
            packaged_python=packaged_python,
        ),
        public_key=public_key,
        max_age=oldest,
        plain_http=plain_http,
    )


conditional = opt.taking("conditions", _conditions)


@app.command("verify")
@conditional
def verify_image(reference: opt.Ref, *, conditions: Conditions, as_json: opt.AsJson = False) -> None:
    """Check the certificate of a published image for this host; exit 7 if it is not valid."""
    verified = verified_for(reference, conditions)
    facts = _facts(verified, conditions.public_key, conditions.max_age)
    if as_json:
        print_json(facts | {"notes": _notes(verified), "certificate": verified.facts})
        return
    print_styled("VERIFIED", "good", f"  {verified.reference}")
    print_facts({name: _words(name, value) for name, value in facts.items() if value not in (None, {}, [])})
    for note in _notes(verified):
        print_note(note)


@app.command("pull")
@conditional
def pull_image(
    reference: opt.Ref, *, conditions: Conditions, as_json: opt.AsJson = False, dry_run: opt.DryRun = False
) -> None:
    """Verify an image, then fetch exactly the verified digest into the local engine."""
    from stackcheck.certificate import pull
    from stackcheck.engine.client import Engine

    verified = verified_for(reference, conditions)
    facts = {"image": pull.local_name(verified), "digest": verified.digest}
    if not dry_run:
        pull.pull(verified, Engine.connect(), report=Progress(), plain_http=conditions.plain_http)
    print_json(facts) if as_json else print_facts(facts)


@app.command("sbom")
def print_sbom(
    reference: opt.Ref,
    *,
    key: opt.PublicKey = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
) -> None:
    """List the packages of a published image, from the signed document that is attached to it."""
    from stackcheck.certificate.verify import attached_sbom

    document = attached_sbom(
        reference, public_key=key_sources.public(key), plain_http=plain_http, warn=print_note
    )
    if as_json:
        print_json(document)
        return
    packages = sorted(document["components"], key=lambda item: (item.get("purl", ""), item["name"]))
    print_table(("package", "version", "kind", "licence"), [_package_row(item) for item in packages])


def verified_for(reference: str, conditions: Conditions) -> Verified:
    """The image, if its certificate satisfies the options."""
    from stackcheck.certificate.verify import verify

    return verify(
        reference,
        conditions.wanted,
        public_key=conditions.public_key,
        max_age=conditions.max_age,
        plain_http=conditions.plain_http,
    )


def machine(device_model: str, driver: str, devices: int | None) -> tuple[str, str | None, int]:
    """Device model, driver and device count to verify for; `auto` stands for those of this host."""
    if AUTO not in {device_model, driver}:
        return device_model, None if driver == NONE else driver, devices or 1

    host = vendors.host()
    model = device_model if device_model != AUTO else _model_of(host)
    count = devices or (len(host.devices) if device_model == AUTO else 1)
    version = host.driver if driver == AUTO else None if driver == NONE else driver
    if device_model == "CPU" and driver == AUTO:
        version = None  # a CPU certificate has no driver, also where the host has GPUs
    return model, version, count


def _model_of(host: vendors.Host) -> str:
    models = {device.model for device in host.devices}
    if len(models) == 1:
        return models.pop()
    raise ConfigurationError(
        "cannot choose a device model for this host",
        got=", ".join(sorted(models)) or "no device",
        expected="devices of exactly one model",
        next_step="name the model to verify for: --device-model MODEL",
    )


def _facts(verified: Verified, pinned: Pinned, max_age: dt.timedelta) -> dict[str, object]:
    return {
        "stack": verified.stack_id,
        "run": str(verified.reference),
        "digest": verified.digest,
        "device_model": verified.device_model,
        "driver": verified.driver,
        "verified_at": verified.verified_at.isoformat(),
        "valid_until": (verified.verified_at + max_age).isoformat(),
        "signed_by": list(keyring.hints(pinned)),
        "tier": verified.facts["run"]["tier"],
        "devices": len(verified.facts["host"]["devices"]),
        "checks": {"passed": len(verified.facts["passed"]), "waived": len(verified.facts["warned"])},
        "bounds": verified.facts.get("bounds", {}),
        "static_only": verified.facts.get("archs", {}).get("staticOnly", []),
        "against": verified.facts.get("against"),
        "derived_from": _derived(verified.facts.get("derivedFrom")),
        "next": f"stackcheck run {verified.reference} -- python3",
    }


def _words(name: str, value: Any) -> str:
    """A fact for a person; `--json` has its parts."""
    if name == "against":
        return against_words(value)
    if name == "derived_from":
        return f"{value['name']}@{value['digest']}: {value['carried']} checks taken over, {value['ran']} ran"
    if isinstance(value, dict):
        return ", ".join(f"{count} {what}" for what, count in value.items())
    return (" or " if name == "signed_by" else ", ").join(value) if isinstance(value, list) else str(value)


def against_words(found: Mapping[str, Any]) -> str:
    """A pair as a certificate states it, in one line."""
    worst = max(found["metrics"], key=lambda each: float(each["loss"]))
    counts = ", ".join(
        f"{sum(each['verdict'] == verdict for each in found['metrics'])} {verdict}"
        for verdict in ("slower", "equal", "noisy")
    )
    return (
        f"{found['reference']}: {counts}; the largest loss is {worst['loss']:+.1%} ({worst['name']}), "
        f"{found['runs']} runs of each, {found['at']}"
    )


def _notes(verified: Verified) -> list[str]:
    """What the user should know although the certificate is valid."""
    waivers = [
        f"{item['check']} is waived by {item['by']} until {item['until']}: {item['reason']} ({item['issue']})"
        for item in verified.facts["waivers"]
    ]
    # Certificates that were signed before known issues existed do not have the key.
    issues = [
        f"known issue {item['id']}: {item['symptom'].rstrip('.')} ({item['issue']})"
        for item in verified.facts.get("knownIssues", ())
    ]
    static = verified.facts.get("archs", {}).get("staticOnly", [])
    never_ran = [f"static only: {arch}: the image has code for it, which never ran" for arch in static]
    experimental = ["this stack is experimental"] if verified.facts["experimental"] else []
    made = [
        f"{name.removesuffix('From')} from {text}"
        for name, text in sorted(verified.facts.get("madeFrom", {}).items())
    ]
    driver = verified.facts.get("driver", {})  # a certificate of before says nothing of the documents
    unlisted = [driver["says"]] if driver.get("state") == "unlisted" and "says" in driver else []
    noisy = [
        f"{each['name']} of {each['check']} was too noisy to compare with the reference"
        for each in (verified.facts.get("against") or {}).get("metrics", ())
        if each["verdict"] == "noisy"
    ]
    python = verified.facts.get("python")  # older certificates have none
    accepted = [_accepted(python)] if python and not python["package"] else []
    below = verified.facts.get("derivedFrom")
    taken = [_taken_over(below)] if below and below["carried"] else []
    return [*experimental, *accepted, *made, *taken, *noisy, *unlisted, *never_ran, *waivers, *issues]


def _derived(found: Mapping[str, Any] | None) -> dict[str, object] | None:
    """The image below, and how many checks ran here and there."""
    if not found:
        return None
    named = {name: found[name] for name in ("name", "digest", "statement", "why")}
    return named | {"ran": len(found["ran"]), "carried": len(found["carried"])}


def _taken_over(found: Mapping[str, Any]) -> str:
    return (
        f"{counted(len(found['carried']), 'check')} did not run in this image, but in {found['name']}"
        f" ({found['digest']}); what lies on it cannot have changed them"
    )


def _accepted(python: Mapping[str, Any]) -> str:
    """A Python of no package, with the files that the one who certified answers for."""
    of_file = {python["file"]: python["sha256"], **python.get("libraries", {})}
    files = ", ".join(f"{file} ({digest})" for file, digest in of_file.items())
    return f"no package owns the image's Python; whoever certified it accepted {files}"


def _package_row(component: dict[str, Any]) -> tuple[str, str, str, str]:
    kind = component.get("purl", f"pkg:{component['type']}/").removeprefix("pkg:").partition("/")[0]
    return component["name"], component.get("version", "-"), kind, _licences(component)


def _licences(component: dict[str, Any]) -> str:
    stated = component.get("licenses", [])
    names = [
        item.get("expression") or item["license"].get("id") or item["license"]["name"] for item in stated
    ]
    return ", ".join(names) or "not stated"
