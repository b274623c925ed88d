"""The verb `export`. In: a stack or an image that was built or tested here. Out: one tar file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, DryRun, Root, new_app
from stackcheck.cli.output import print_facts, print_json
from stackcheck.oci.image_layout import ImageLayout
from stackcheck.suite.subject import find_image

app = new_app()


@app.command("export")
def export_image(
    name: Annotated[
        str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or an image that was tested here.")
    ],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="The tar file to write.", show_default="STACK.tar"),
    ] = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
    root: Root = HERE,
) -> None:
    """Write an image as one tar for `docker load`, `podman load` and Apptainer."""
    image = find_image(name, root.resolve())
    layout = ImageLayout(image.layout)
    path = output or Path(f"{image.layout.parent.name}.tar")
    if dry_run:
        print(f"{image.manifest_digest}: write {path}, {layout.size_bytes() / 1e6:.1f} MB")
        return
    layout.export(image.reference, path)
    facts = {"tar": str(path), "digest": image.manifest_digest, "next": f"docker load --input {path}"}
    print_json(facts) if as_json else print_facts(facts)
