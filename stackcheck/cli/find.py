"""The verb `find`. In: a registry or layout, and a host. Out: the certified images for it, newest first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from stackcheck.certificate import key_sources
from stackcheck.cli import options as opt
from stackcheck.cli.consumer import AUTO, Devices, LowestTier, MaxAge, NoWaivers, machine
from stackcheck.cli.options import duration
from stackcheck.cli.output import counted, print_fitted, print_json
from stackcheck.errors import CertificateError

if TYPE_CHECKING:
    from stackcheck.certificate.find import Candidate, ImageQuery
    from stackcheck.policy import Tier as TierName

app = opt.new_app()

COLUMNS = ("TAG", "TORCH", "CERTIFIED FOR", "VERDICT OF", "RUN")


@app.command("find")
def find_images(
    target: Annotated[
        str | None, opt.argument("TARGET", "oci:DIR or HOST/REPO.", "`publish` in matrix.yaml")
    ] = None,
    *,
    torch: Annotated[str | None, opt.option("--torch VERSION", "torch: 2.13 or '>=2.12'.", "any")] = None,
    devices: Devices = None,
    no_waivers: NoWaivers = False,
    every: Annotated[bool, opt.option("--all", "Also list the others, and say why not.")] = False,
    tier: LowestTier = None,
    max_age: MaxAge = "30d",
    gpu: Annotated[
        str | None, opt.option("--device-model --gpu MODEL", "Device model.", "this host's")
    ] = None,
    driver: Annotated[
        str | None,
        opt.option(
            "--driver PATTERN",
            "Driver version, or a pattern of versions.",
            "this host's, or any with --device-model",
        ),
    ] = None,
    key: opt.PublicKey = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """List the images that are certified for a host, the newest first; exit 7 if no image is."""
    from stackcheck.certificate import find

    place = opt.target_of(root, target)
    wanted = _wanted(gpu, driver, torch, devices, tier, waivers=not no_waivers)
    found = find.find(
        place,
        wanted,
        public_key=key_sources.public(key),
        max_age=duration(max_age, "--max-age"),
        plain_http=plain_http,
    )
    fitting = [each for each in found if each.refused is None]
    shown = found if every else fitting
    print_json([_json(each) for each in shown]) if as_json else _print(shown)
    if not fitting:
        raise CertificateError(
            "no image is certified for this host",
            where=place,
            got=f"{counted(len(found), 'image')}, and none fits",
            expected=_host(wanted),
            next_step="add --all to see why not, or certify one here: stackcheck certify",
        )


def _wanted(
    gpu: str | None,
    driver: str | None,
    torch: str | None,
    devices: int | None,
    tier: TierName | None,
    *,
    waivers: bool,
) -> ImageQuery:
    from stackcheck.certificate.find import ImageQuery

    asked = ImageQuery(torch=torch, tier=tier, waivers=waivers)
    if gpu:
        return dataclasses.replace(asked, device_model=gpu, driver=driver, devices=devices or 1)
    model, version, count = machine(AUTO, driver or AUTO, devices)
    exact = driver is None
    return dataclasses.replace(asked, device_model=model, driver=version, exact=exact, devices=count)


def _host(wanted: ImageQuery) -> str:
    driver = f", driver {wanted.driver}" if wanted.driver else ""
    torch = f", torch {wanted.torch}" if wanted.torch else ""
    return f"{wanted.device_model} x{wanted.devices}{driver}{torch}"


def _print(found: list[Candidate]) -> None:
    if found:
        print_fitted(COLUMNS, [_row(each) for each in found], keep=COLUMNS[-1])


def _row(each: Candidate) -> tuple[str, ...]:
    when = f"{each.verified_at:%Y-%m-%d %H:%M}" if each.machine != "-" else "-"
    return each.tag, each.torch, each.machine, when, each.reference or f"no: {each.refused}"


def _json(each: Candidate) -> dict[str, Any]:
    return dataclasses.asdict(each) | {"verified_at": each.verified_at.isoformat()}
