"""The verb `policy`. In: a public key, and what certificates must say. Out: a policy for another program."""

from typing import Annotated

from stackcheck.certificate import cluster_policies, key_sources
from stackcheck.certificate.cluster_policies import Demand, Form
from stackcheck.cli import options as opt
from stackcheck.cli.times import duration
from stackcheck.policy import Certifying as TierName

app = opt.new_app()


@app.command("policy")
def print_policy(
    form: Annotated[Form, opt.argument("ENGINE", "cosign, kyverno or policy-controller.")],
    *,
    images: Annotated[
        list[str] | None,
        opt.option(
            "--images PATTERN", "Images that a cluster's policy is about: 'HOST/REPO*'; once or more.", "none"
        ),
    ] = None,
    devices: Annotated[
        int | None,
        opt.option(
            "--devices",
            "With --device-model: the number of devices that were tested together.",
            "any number",
            min=1,
        ),
    ] = None,
    node_label: Annotated[
        str | None,
        opt.option(
            "--node-label KEY=VALUE", "Pods must ask for nodes with this label; * is a pattern.", "any node"
        ),
    ] = None,
    packaged_python: opt.PackagedPython = False,
    tier: Annotated[TierName | None, opt.option("--tier", "Exactly this tier.", "any that certifies")] = None,
    max_age: Annotated[
        str | None,
        opt.option(
            "--max-age DURATION",
            "Largest age of each certificate: 30d, 12h or 45m (Kyverno only).",
            "any age",
        ),
    ] = None,
    gpu: Annotated[
        str | None, opt.option("--device-model --gpu MODEL", "Device model of the nodes.", "any")
    ] = None,
    key: opt.PublicKey = None,
) -> None:
    """Print a policy that admits only certified images: for cosign, Kyverno or policy-controller."""
    demand = Demand(
        images=tuple(images or ()),
        levels=cluster_policies.demanded_levels(gpu, devices, tier, packaged_python=packaged_python),
        max_age=duration(max_age, "--max-age") if max_age else None,
        node_label=node_label,
    )
    print(cluster_policies.render(form, key_sources.public(key), demand), end="")
