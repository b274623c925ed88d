"""The verb `mirror`. In: selectors. Out: the files that a site has to copy for these stacks."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from stackcheck.cli.options import HERE, AsJson, MirrorsFile, Root, Selectors, new_app
from stackcheck.cli.output import print_json, print_table
from stackcheck.errors import ConfigurationError
from stackcheck.matrix import resolve

if TYPE_CHECKING:
    from stackcheck.recipe.mirror_list import WantedFiles

app = new_app()


@app.command("mirror")
def mirror(
    selectors: Selectors = None,
    *,
    print_: Annotated[
        bool, typer.Option("--print", help="Print what a site has to copy; download nothing.")
    ] = False,
    mirrors: MirrorsFile = None,
    as_json: AsJson = False,
    root: Root = HERE,
) -> None:
    """List which files a site has to copy to lock and build stacks without the public hosts."""
    from stackcheck import mirrors as sites
    from stackcheck.imaging import platforms
    from stackcheck.recipe import mirror_list
    from stackcheck.recipe.upstream import Upstream

    if not print_:
        raise ConfigurationError(
            "copying is the work of the site's own tools",
            expected="--print",
            next_step="stackcheck mirror --print",
        )
    upstream = Upstream(mirrors=sites.load(mirrors))
    stacks = resolve.load_stacks(root, selectors or ())
    best = {stack.id: platforms.target(stack, platforms.native()).best for stack in stacks}
    found = {
        stack.id: mirror_list.wanted(stack, root / "images", upstream, best[stack.id]) for stack in stacks
    }
    if as_json:
        print_json({name: [dataclasses.asdict(one) for one in files] for name, files in found.items()})
        return
    for name, files in found.items():
        print(name)
        print_table(("kind", "name", "place", "bytes", "sha256", "note"), [_row(one) for one in files])


def _row(one: WantedFiles) -> tuple[str, ...]:
    hashes = f"one of {len(one.sha256)}" if len(one.sha256) > 1 else "".join(one.sha256)
    size = "?" if one.size_bytes is None else str(one.size_bytes)
    return one.kind, one.name, one.place, size, hashes or "?", one.note
