"""The options and arguments that several verbs share, and the one style of help.

In: nothing. Out: annotated types for Typer, each declared once, and `new_app` for the verbs of a module.
Every verb lists its options in this order: what to do, where to (--to, --key, --plain-http), how to build,
how to report (--json, --dry-run, --root).
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from stackcheck.errors import ConfigurationError
from stackcheck.imaging.wheels.wheel_cache import VARIABLE
from stackcheck.policy import Tier as TierName
from stackcheck.recipe.mirrors import VARIABLE as MIRRORS
from stackcheck.vendors import Vendor as VendorName

HERE = Path()


def new_app() -> typer.Typer:
    """A group for the verbs of one module; its help is plain text that can be copied."""
    return typer.Typer(add_completion=False, rich_markup_mode=None)


Selectors = Annotated[
    list[str] | None,
    typer.Argument(metavar="SELECTOR", help="Patterns for stack ids, such as 'rocm7*'.", show_default=False),
]
Name = Annotated[str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or any image reference.")]
Ref = Annotated[
    str, typer.Argument(metavar="REF", help="oci:DIR:TAG or HOST/REPO:TAG; @sha256:… instead of :TAG works.")
]

Tier = Annotated[
    TierName | None,
    typer.Option(
        "--tier", help="How thorough the suites are.", show_default="the tier that certifies, in matrix.yaml"
    ),
]
Vendor = Annotated[
    VendorName | None,
    typer.Option("--gpu-vendor", help="The vendor whose checks run.", show_default="the stack's vendor"),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="DOCUMENT",
        help="Also hold the image to the figures of a document (trainers/rows.yaml) for these devices.",
        show_default="none",
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Run the suites again even if nothing changed.")]

Target = Annotated[
    str | None,
    typer.Option(
        "--to",
        metavar="TARGET",
        help="Where to publish: oci:DIR or HOST/REPO.",
        show_default="`publish` in matrix.yaml",
    ),
]
SigningKey = Annotated[
    Path | None,
    typer.Option(
        "--key",
        metavar="FILE",
        help="Signing key (PEM).",
        show_default="this user's key, made on first use",
    ),
]
SignWith = Annotated[
    str | None,
    typer.Option(
        "--sign-with",
        metavar="CMD",
        help="A program that signs: bytes in, signature out; --key is its public key.",
        show_default="the signing key",
    ),
]
PublicKey = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="FILE|URL",
        help="Public key (PEM) to verify with; a URL ends in #sha256=FINGERPRINT.",
        show_default="this user's key",
    ),
]
PlainHttp = Annotated[
    bool, typer.Option("--plain-http", help="Use http for a registry on another machine (not encrypted).")
]

Wheelhouse = Annotated[
    Path | None,
    typer.Option(
        "--wheelhouse",
        metavar="DIR",
        help="Take wheels from this folder only, and from no package index.",
        show_default="none",
    ),
]
WheelCache = Annotated[
    str | None,
    typer.Option(
        "--wheel-cache",
        metavar="DIR",
        help="Keep downloaded and built wheels in this folder; `off` disables the cache.",
        show_default=f"${VARIABLE}, else the user's cache folder",
    ),
]
Platform = Annotated[
    Literal["linux/amd64", "linux/arm64"] | None,
    typer.Option("--platform", help="The platform to build for.", show_default="this host's platform"),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Run every build step again.")]

MirrorsFile = Annotated[
    Path | None,
    typer.Option(
        "--mirrors",
        metavar="FILE",
        help="A file with this site's mirrors of public indexes, archives and registries.",
        show_default=f"${MIRRORS}, else the user's mirrors.yaml",
    ),
]

AcceptPython = Annotated[
    list[str] | None,
    typer.Option(
        "--accept-python",
        metavar="SHA256",
        help="The image's Python may be a file of this digest, although no package owns it; once or more.",
        show_default="none: a package must own it",
    ),
]
PackagedPython = Annotated[
    bool,
    typer.Option("--packaged-python", help="Refuse an image whose Python belongs to no package of it."),
]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]
Root = Annotated[
    Path,
    typer.Option("--root", metavar="DIR", help="The checkout.", show_default="the current folder"),
]


def sign_words(command: str | None) -> tuple[str, ...]:
    """The words of --sign-with, as a shell would split them; no shell runs them."""
    try:
        words = tuple(shlex.split(command or ""))
    except ValueError as error:
        raise ConfigurationError(
            "the command in --sign-with has an unmatched quote",
            got=command,
            expected=f"quotes in pairs ({error})",
        ) from error
    if command is not None and not words:
        raise ConfigurationError("--sign-with is empty", expected="a program and its arguments")
    return words


def accepted_python(given: list[str] | None, *names: str) -> tuple[str, ...]:
    """The digests of --accept-python, as sha256:HEX, each once; sha256sum prints them without the prefix.

    Raises:
        ConfigurationError: One is not a digest, or all of `names` are stacks: a package owns the Python of
            those.
    """
    found = tuple(f"sha256:{text.lower().removeprefix('sha256:')}" for text in given or ())
    for text, digest in zip(given or (), found, strict=True):
        if not re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
            raise ConfigurationError(
                "--accept-python takes the SHA-256 of a file",
                got=f"{text}: {len(digest.removeprefix('sha256:'))} characters",
                expected="64 hexadecimal digits, as sha256sum prints them",
                next_step="leave the option out: the error about a Python of no package has its digest",
            )
    if found and not any(re.search("[/:@]", name) for name in names):
        raise ConfigurationError(
            "--accept-python is for images that were not built here",
            got=f"the stack {' and the stack '.join(names)}",
            expected="the reference of an image: in a stack a package owns the Python",
            next_step="leave the option out",
        )
    return tuple(dict.fromkeys(found))


def key_path(key: Path | None, sign_with: str | None) -> Path:
    """The signing key, or the public key of --sign-with: by default this user's."""
    from stackcheck.certificate import keys  # not above: `stackcheck list` needs no cryptography

    path = key or keys.default_path()
    return keys.public_path(path) if sign_with is not None and path.suffix == ".key" else path
