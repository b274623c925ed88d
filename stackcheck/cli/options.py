"""Options and arguments that several verbs share, each declared once. In: nothing. Out: types for Typer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stackcheck.build.wheels.wheel_cache import VARIABLE
from stackcheck.matrix.matrix import Tier as TierName
from stackcheck.vendors import Vendor as VendorName

HERE = Path()

Selectors = Annotated[
    list[str] | None, typer.Argument(metavar="[SELECTOR]…", help="Patterns on stack ids, such as 'rocm7*'.")
]
Name = Annotated[str, typer.Argument(metavar="STACK|IMAGE", help="A stack id, or any image reference.")]
Ref = Annotated[str, typer.Argument(metavar="REF", help="oci:DIR:TAG, HOST/REPO:TAG, or with @sha256:….")]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done, and change nothing.")]
Root = Annotated[Path, typer.Option("--root", help="The checkout.", show_default=False)]

Tier = Annotated[TierName, typer.Option("--tier", help="How thorough: smoke, standard or soak.")]
Vendor = Annotated[
    VendorName | None,
    typer.Option("--gpu-vendor", help="The vendor whose checks run (default: the stack's)."),
]
Force = Annotated[bool, typer.Option("--force", help="Run the suites again even if nothing changed.")]
Target = Annotated[
    str | None, typer.Option("--to", help="Where to publish: oci:DIR or HOST/REPO (default: matrix.yaml's).")
]
PlainHttp = Annotated[bool, typer.Option("--plain-http", help="Allow http to a registry on another machine.")]
SigningKey = Annotated[
    Path | None,
    typer.Option("--key", help="Signing key, PEM (default: this user's own, made on first use)."),
]
PublicKey = Annotated[Path | None, typer.Option("--key", help="Public key, PEM (default: this user's own).")]

Wheelhouse = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Take wheels from this folder only, from no index.")
]
WheelCache = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Keep downloaded and built wheels here, by hash; `off` disables it "
        f"(default: ${VARIABLE}, or the user's cache folder).",
    ),
]
Platform = Annotated[
    Literal["linux/amd64", "linux/arm64"] | None,
    typer.Option(help="The platform to build for (default: this host's own)."),
]
NoCache = Annotated[bool, typer.Option("--no-cache", help="Build every step again.")]
