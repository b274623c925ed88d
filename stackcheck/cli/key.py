"""The verb `key`. In: a path, or nothing. Out: the public half of the signing key, or cosign's policy."""

from typing import Annotated

from stackcheck.certificate import keyring, keys
from stackcheck.cli import options as opt
from stackcheck.cli.output import print_facts, print_json
from stackcheck.errors import ConfigurationError

app = opt.new_app()


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
    from stackcheck.certificate.cluster_policies import policy_text

    if policy:
        print(policy_text(), end="")
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
