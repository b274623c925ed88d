"""The verb that takes an image out of here as one file: export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stackcheck import export
from stackcheck.cli import named
from stackcheck.cli.output import print_facts, print_json

app = typer.Typer()


@app.command("export")
def export_image(
    name: Annotated[str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or an image tested here.")],
    *,
    output: Annotated[Path | None, typer.Option(help="The tar to write (default: STACK.tar).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be done.")] = False,
    root: Annotated[Path, typer.Option(help="The checkout.", show_default=False)] = Path(),
) -> None:
    """Write an image as one tar for `docker load`, `podman load` and Apptainer."""
    image = named.image(name, root.resolve())
    path = output or Path(f"{image.layout.parent.name}.tar")
    if dry_run:
        print(f"{image.manifest_digest}: write {path}, {export.size_bytes(image.layout) / 1e6:.1f} MB")
        return
    export.export(image.layout, image.reference, path)
    facts = {"tar": str(path), "digest": image.manifest_digest, "next": f"docker load --input {path}"}
    print_json(facts) if as_json else print_facts(facts)
