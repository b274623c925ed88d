"""The verbs of who uses images: verify, pull, run."""

from __future__ import annotations

import datetime as dt
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stackcheck.certificate import keys
from stackcheck.cli.options import AsJson, DryRun, PlainHttp, PublicKey, Ref
from stackcheck.cli.output import Progress, print_facts, print_json
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from stackcheck import vendors
    from stackcheck.certificate.verify import Verified

app = typer.Typer(rich_markup_mode=None)

AUTO = "auto"
NONE = "none"
_AGE = re.compile(r"(?P<number>\d+)(?P<unit>[dhm])")
_UNITS = {"d": "days", "h": "hours", "m": "minutes"}

MaxAge = Annotated[str, typer.Option(help="How old the verdict may be: 30d, 12h, 45m.")]
Model = Annotated[str, typer.Option(help="Device model it has to be certified for.")]
Driver = Annotated[str, typer.Option(help="Driver it has to be certified for; 'none' without a GPU.")]


@app.command("verify")
def verify_image(
    reference: Ref,
    *,
    key: PublicKey = None,
    max_age: MaxAge = "30d",
    device_model: Model = AUTO,
    driver: Driver = AUTO,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
) -> None:
    """Check a published image's certificate against this host; exit 7 when it does not hold."""
    verified = _verified(reference, key, max_age, device_model, driver, plain_http=plain_http)
    facts = _facts(verified)
    if as_json:
        print_json(facts | {"certificate": verified.facts})
        return
    print_facts({name: str(value) for name, value in facts.items() if value is not None})
    for name in _remarks(verified):
        print(f"note: {name}", file=sys.stderr)


@app.command("pull")
def pull_image(
    reference: Ref,
    *,
    key: PublicKey = None,
    max_age: MaxAge = "30d",
    device_model: Model = AUTO,
    driver: Driver = AUTO,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Verify, then fetch exactly that digest into the local engine."""
    from stackcheck.certificate import pull
    from stackcheck.engine.client import Engine

    verified = _verified(reference, key, max_age, device_model, driver, plain_http=plain_http)
    facts = {"image": pull.local_name(verified), "digest": verified.digest}
    if not dry_run:
        pull.pull(verified, Engine.connect(), report=Progress(), plain_http=plain_http)
    print_json(facts) if as_json else print_facts(facts)


@app.command("run")
def run_image(
    reference: Ref,
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="What to run in the image.")],
    *,
    key: PublicKey = None,
    max_age: MaxAge = "30d",
    device_model: Model = AUTO,
    driver: Driver = AUTO,
    plain_http: PlainHttp = False,
    dry_run: DryRun = False,
) -> None:
    """Verify, then run a command in the image with the current folder mounted, and nothing else."""
    from stackcheck import vendors
    from stackcheck.certificate import pull
    from stackcheck.engine.client import Engine

    verified = _verified(reference, key, max_age, device_model, driver, plain_http=plain_http)
    vendor = verified.facts["host"]["vendor"]
    if dry_run:
        print(f"{verified.reference}: run {' '.join(command)} with {Path.cwd()} mounted, on vendor {vendor}")
        return
    engine = Engine.connect()
    name = pull.pull(verified, engine, report=Progress(), plain_http=plain_http)
    needs = vendors.module(vendor).container_needs()
    code = pull.run(name, engine, command, needs=needs, folder=Path.cwd(), on_line=_print_line)
    raise typer.Exit(code)


def _verified(
    reference: str, key: Path | None, max_age: str, device_model: str, driver: str, *, plain_http: bool
) -> Verified:
    from stackcheck.certificate.verify import verify

    model, version = _machine(device_model, driver)
    return verify(
        reference,
        public_key=keys.load_public(key),
        max_age=_age(max_age),
        device_model=model,
        driver=version,
        plain_http=plain_http,
    )


def _machine(device_model: str, driver: str) -> tuple[str, str | None]:
    """The device model and driver to verify for; `auto` is what this host has."""
    if AUTO not in {device_model, driver}:
        return device_model, None if driver == NONE else driver
    from stackcheck import vendors

    host = vendors.host()
    model = device_model if device_model != AUTO else _model_of(host)
    version = host.driver if driver == AUTO else None if driver == NONE else driver
    if device_model == "CPU" and driver == AUTO:
        version = None  # a processor has no driver, whatever GPUs stand beside it
    return model, version


def _model_of(host: vendors.Host) -> str:
    models = {device.model for device in host.devices}
    if len(models) == 1:
        return models.pop()
    raise ConfigurationError(
        "this host has no device, or devices of several models",
        got=", ".join(sorted(models)) or "none",
        next_step="name the one to verify for: --device-model MODEL",
    )


def _age(text: str) -> dt.timedelta:
    match = _AGE.fullmatch(text)
    if match is None:
        raise ConfigurationError("this is no age", got=text, expected="a number and d, h or m: 30d")
    try:
        return dt.timedelta(**{_UNITS[match["unit"]]: int(match["number"])})
    except OverflowError as error:
        raise ConfigurationError("this age is too large", got=text, expected="30d") from error


def _facts(verified: Verified) -> dict[str, object]:
    return {
        "stack": verified.stack_id,
        "run": str(verified.reference),
        "digest": verified.digest,
        "device_model": verified.device_model,
        "driver": verified.driver,
        "verified_at": verified.verified_at.isoformat(),
        "checks": f"{len(verified.facts['passed'])} passed, {len(verified.facts['warned'])} waived",
        "next": f"stackcheck run {verified.reference} -- python3",
    }


def _remarks(verified: Verified) -> list[str]:
    """What a careful user has to know although the certificate holds."""
    waivers = [
        f"{item['check']} is waived by {item['by']}: {item['reason']}" for item in verified.facts["waivers"]
    ]
    return (["this stack is experimental"] if verified.facts["experimental"] else []) + waivers


def _print_line(line: str) -> None:
    print(line.rstrip("\n"), flush=True)
