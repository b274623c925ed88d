"""The verbs policy and key. In: a key, and what certificates must say. Out: a policy, or the public half."""

from typing import Annotated

from stackcheck.certificate import cluster_policies, key_sources, keyring, keys
from stackcheck.certificate.cluster_policies import Demand, Form
from stackcheck.cli import options as opt
from stackcheck.cli.options import duration
from stackcheck.cli.output import print_facts, print_json
from stackcheck.errors import ConfigurationError
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


@app.command("key")
def show_key(
    *,
    policy: Annotated[
        bool, opt.option("--policy", "Print the policy for cosign instead of the key.")
    ] = False,
    passphrase: Annotated[bool, opt.option("--passphrase", "Encrypt a new key with a passphrase.")] = False,
    key: opt.SigningKey = None,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Show the public half of the signing key; make the key on first use."""
    if policy:
        print(cluster_policies.policy_text(), end="")
        return
    path = key or keys.default_path()
    if dry_run and not path.exists():
        print(f"{path}: make an ECDSA P-256 key with mode 0600, and {keys.public_path(path)}")
        return
    if passphrase and path.exists():
        raise ConfigurationError(
            "the signing key exists already; --passphrase is for a new key",
            where=str(path),
            expected="a path at which no key exists",
            next_step=f"openssl pkcs8 -topk8 -in {path} -out NEW.key; or make another: --key PATH",
        )
    public = keys.load_or_create(path, encrypt=passphrase).public_key()
    pem = keys.public_pem(public).decode()
    facts = {"key": str(path), "public": str(keys.public_path(path)), "sha256": keyring.hint(public)}
    if as_json:
        print_json(facts | {"pem": pem})
        return
    print_facts(facts)
    print(pem, end="")
