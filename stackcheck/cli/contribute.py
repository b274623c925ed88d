"""The verb `contribute`. In: a result.json, or a folder of bundles. Out: a bundle, or what they say."""

from pathlib import Path
from typing import Annotated

from stackcheck.cli import options as opt
from stackcheck.cli.output import print_facts, print_table
from stackcheck.errors import ConfigurationError

app = opt.new_app()


Check = Annotated[
    Path | None, opt.option("--check FOLDER", "Check the bundles of a folder instead.", "none", exists=True)
]


@app.command("contribute")
def contribute(
    result: Annotated[
        Path | None, opt.argument("RESULT", "The result.json of a run.", "none", exists=True)
    ] = None,
    *,
    check: Check = None,
    without_key: Annotated[
        str | None,
        opt.option(
            "--keyless public|FILE",
            "Sign as the identity of this workflow, or as yours in a browser, with the public services "
            "of sigstore or those in a ClientTrustConfig.",
            "a key signs",
        ),
    ] = None,
    to: Annotated[Path, opt.option("--to FOLDER", "Where the bundle goes.")] = Path(),
    key: Annotated[
        Path | None,
        opt.option(
            "--key FILE",
            "The private key; with --check the public keys that are trusted, or a folder with "
            "contributors.pub and contributors.yaml.",
            "your own",
        ),
    ] = None,
    root: opt.Root = opt.HERE,
) -> None:
    """Write a signed bundle of a run for others: model, driver, versions, figures, verdict, no identity.

    With --check: exit 0 if a contributor signed each bundle, and none says more than a bundle may.
    """
    if (result is None) == (check is None):
        raise ConfigurationError(
            "one of RESULT and --check is needed", expected="a result.json, or a folder of bundles"
        )
    if check is not None:
        _check(check, root.resolve(), key)
    elif result is not None:
        _write(result, root.resolve(), to, key, without_key)


def _check(folder: Path, root: Path, key: Path | None) -> None:
    """Show the bundles of a folder, if each is accepted."""
    from stackcheck.proof import contribution

    rows = [
        (b.file.name, f"{b.told.model} x{b.told.count}", b.told.verdict, str(len(b.told.figures)), b.signer)
        for b in contribution.folder(folder, root, contribution.contributors(key))
    ]
    print_table(("BUNDLE", "DEVICES", "VERDICT", "FIGURES", "SIGNED BY"), rows)


def _write(result: Path, root: Path, to: Path, key: Path | None, without_key: str | None) -> None:
    """Write the bundle of a result."""
    from stackcheck.certificate import keyless, keys, signers
    from stackcheck.files.atomic import write_atomically
    from stackcheck.proof import contribution

    told = contribution.of_result(result, root)
    body = (
        keyless.sign(contribution.statement_of(told), without_key)
        if without_key
        else contribution.sign(told, signers.choose(key or keys.default_path(), create=True))
    )
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
