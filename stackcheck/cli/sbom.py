"""The verb that says what is in a published image: sbom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from stackcheck import keys, sbom
from stackcheck.cli.output import print_json, print_table

app = typer.Typer(rich_markup_mode=None)


@app.command("sbom")
def print_sbom(
    reference: Annotated[
        str, typer.Argument(metavar="REF", help="oci:DIR:TAG or HOST/REPO:TAG, or @sha256:….")
    ],
    *,
    key: Annotated[Path | None, typer.Option(help="Public key, PEM (default: this user's own).")] = None,
    plain_http: Annotated[
        bool, typer.Option("--plain-http", help="Talk http to a registry on another machine.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The signed CycloneDX document itself.")] = False,
) -> None:
    """List the packages of a published image, from the signed document that is attached to it."""
    document = sbom.attached(reference, public_key=keys.load_public(key), plain_http=plain_http)
    if as_json:
        print_json(document)
        return
    found = sorted(document["components"], key=lambda item: (item.get("purl", ""), item["name"]))
    print_table(("package", "version", "kind", "licence"), [_row(item) for item in found])


def _row(component: dict[str, Any]) -> tuple[str, str, str, str]:
    kind = component.get("purl", f"pkg:{component['type']}/").removeprefix("pkg:").partition("/")[0]
    return component["name"], component.get("version", "-"), kind, _licences(component)


def _licences(component: dict[str, Any]) -> str:
    stated = component.get("licenses", [])
    names = [
        item.get("expression") or item["license"].get("id") or item["license"]["name"] for item in stated
    ]
    return ", ".join(names) or "not stated"
