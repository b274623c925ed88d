"""The verb `contribute`. In: a result.json, or a folder of bundles. Out: a bundle, or what they say."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from stackcheck.cli.options import HERE, Root, new_app
from stackcheck.cli.output import print_facts, print_table
from stackcheck.errors import ConfigurationError

app = new_app()


@app.command("contribute")
def contribute(
    result: Annotated[
        Path | None, typer.Argument(metavar="RESULT", help="The result.json of a run.", show_default="none")
    ] = None,
    *,
    check: Annotated[
        Path | None,
        typer.Option(
            "--check", metavar="FOLDER", help="Check the bundles of a folder instead.", show_default="none"
        ),
    ] = None,
    to: Annotated[Path, typer.Option("--to", metavar="FOLDER", help="Where the bundle goes.")] = Path(),
    key: Annotated[
        Path | None,
        typer.Option(
            "--key",
            metavar="FILE",
            help="The private key; with --check the public keys that are trusted.",
            show_default="your own",
        ),
    ] = None,
    root: Root = HERE,
) -> None:
    """Write a signed bundle of a run for others: model, driver, versions, figures, verdict, no identity.

    With --check: exit 0 if a trusted key signed each bundle, and none says more than a bundle may.
    """
    from stackcheck.certificate import keys, signers
    from stackcheck.files.atomic import write_atomically
    from stackcheck.proof import contribution

    if (result is None) == (check is None):
        raise ConfigurationError(
            "one of RESULT and --check is needed", expected="a result.json, or a folder of bundles"
        )
    if check is not None:
        found = list(contribution.folder(check, root.resolve(), keys.load_public(key)))
        rows = [
            (b.file.name, f"{b.told.model} x{b.told.count}", b.told.verdict, str(len(b.told.figures)))
            for b in found
        ]
        print_table(("BUNDLE", "DEVICES", "VERDICT", "FIGURES"), rows)
        return
    assert result is not None
    told = contribution.of_result(result, root.resolve())
    body = contribution.sign(told, signers.choose(key or keys.default_path(), create=True))
    path = to / contribution.name_of(told)
    write_atomically(path, (body,))
    print_facts(
        {
            "file": str(path),
            "devices": f"{told.model} x{told.count}",
            "verdict": told.verdict,
            "figures": str(len(told.figures)),
            "next": "read it (base64 in `payload`), then add it to a repository of results",
        }
    )
