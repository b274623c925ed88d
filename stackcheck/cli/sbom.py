"""The verb that says what is in a published image: sbom."""

from __future__ import annotations

from typing import Any

import typer

from stackcheck.certificate import attached_sbom, keys
from stackcheck.cli.options import AsJson, PlainHttp, PublicKey, Ref
from stackcheck.cli.output import print_json, print_table

app = typer.Typer(rich_markup_mode=None)


@app.command("sbom")
def print_sbom(
    reference: Ref,
    *,
    key: PublicKey = None,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
) -> None:
    """List the packages of a published image, from the signed document that is attached to it."""
    document = attached_sbom.attached(reference, public_key=keys.load_public(key), plain_http=plain_http)
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
