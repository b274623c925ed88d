"""The verb `policy`. In: a public key, and what certificates must say. Out: a policy for another program."""

from __future__ import annotations

from typing import Annotated

import typer

from stackcheck.certificate import cluster_policies, key_sources
from stackcheck.certificate.cluster_policies import Demand, Form
from stackcheck.cli.options import PackagedPython, PublicKey, new_app
from stackcheck.cli.times import duration
from stackcheck.policy import Certifying as TierName

app = new_app()


@app.command("policy")
def print_policy(
    form: Annotated[Form, typer.Argument(metavar="ENGINE", help="cosign, kyverno or policy-controller.")],
    *,
    images: Annotated[
        list[str] | None,
        typer.Option(
            "--images",
            metavar="PATTERN",
            help="Images that a cluster's policy is about: 'HOST/REPO*'; once or more.",
            show_default="none",
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=1,
            help="With --device-model: the number of devices that were tested together.",
            show_default="any number",
        ),
    ] = None,
    node_label: Annotated[
        str | None,
        typer.Option(
            "--node-label",
            metavar="KEY=VALUE",
            help="Pods must ask for nodes with this label; * is a pattern.",
            show_default="any node",
        ),
    ] = None,
    packaged_python: PackagedPython = False,
    tier: Annotated[
        TierName | None,
        typer.Option("--tier", help="Exactly this tier.", show_default="any that certifies"),
    ] = None,
    max_age: Annotated[
        str | None,
        typer.Option(
            "--max-age",
            metavar="DURATION",
            help="Largest age of each certificate: 30d, 12h or 45m (Kyverno only).",
            show_default="any age",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--device-model", "--gpu", metavar="MODEL", help="Device model of the nodes.", show_default="any"
        ),
    ] = None,
    key: PublicKey = None,
) -> None:
    """Print a policy that admits only certified images: for cosign, Kyverno or policy-controller."""
    demand = Demand(
        images=tuple(images or ()),
        levels=cluster_policies.demanded_levels(gpu, devices, tier, packaged_python=packaged_python),
        max_age=duration(max_age, "--max-age") if max_age else None,
        node_label=node_label,
    )
    print(cluster_policies.render(form, key_sources.public(key), demand), end="")
