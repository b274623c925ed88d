"""The verbs of who keeps images: revoke, promote, key."""

from __future__ import annotations

import datetime as dt
from typing import Annotated

import typer

from stackcheck.certificate import keys
from stackcheck.cli.options import AsJson, DryRun, PlainHttp, PublicKey, Ref, SigningKey
from stackcheck.cli.output import Progress, print_facts, print_json

app = typer.Typer(rich_markup_mode=None)


@app.command("revoke")
def revoke_image(
    reference: Ref,
    *,
    reason: Annotated[str, typer.Option(help="Why; it is signed and shown to whoever verifies.")],
    key: SigningKey = None,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Withdraw a certificate: a signed FAILED verdict, then the floating tags back to what was certified."""
    from stackcheck.certificate.revoke import revoke

    signing_key = keys.load(key or keys.default_path())
    if dry_run:
        print(f"{reference}: append a FAILED verdict ({reason}), then move its floating tags back")
        return
    now = dt.datetime.now(dt.UTC)
    done = revoke(
        reference, reason=reason, key=signing_key, now=now, report=Progress(), plain_http=plain_http
    )
    facts = {"digest": done.digest, "moved": done.moved, "removed": done.removed, "left": done.left}
    if as_json:
        print_json(facts)
        return
    print_facts({name: str(value) for name, value in facts.items() if value})
    if done.left:
        print("note: no earlier image is certified, so these tags still name it; verify refuses them")


@app.command("promote")
def promote_image(
    reference: Ref,
    *,
    to: Annotated[str, typer.Option("--to", help="Where to copy it: oci:DIR or HOST/REPO.")],
    key: PublicKey = None,
    plain_http: PlainHttp = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Copy a certified image and its certificate to another target; the digest stays."""
    from stackcheck.certificate import publish
    from stackcheck.oci.store import parse_target

    to = parse_target(to)
    public_key = keys.load_public(key)
    if dry_run:
        print(f"{reference}: copy image and certificate to {to}, tag last")
        return
    done = publish.promote(
        reference, target=to, public_key=public_key, report=Progress(), plain_http=plain_http
    )
    facts = {
        "reference": str(done.reference),
        "unique": str(done.unique),
        "digest": done.digest,
        "next": f"stackcheck verify {done.reference}",
    }
    print_json(facts) if as_json else print_facts(facts)


@app.command("key")
def show_key(
    *,
    key: SigningKey = None,
    policy: Annotated[bool, typer.Option("--policy", help="Print the policy for cosign instead.")] = False,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Make the signing key on first use, and show its public half."""
    from stackcheck.certificate.predicates import policy_text

    if policy:
        print(policy_text(), end="")
        return
    path = key or keys.default_path()
    if dry_run and not path.exists():
        print(f"{path}: make an ECDSA P-256 key, mode 0600, and {keys.public_path(path)}")
        return
    public = keys.load_or_create(path).public_key()
    pem = keys.public_pem(public).decode()
    facts = {"key": str(path), "public": str(keys.public_path(path)), "sha256": keys.hint(public)}
    if as_json:
        print_json(facts | {"pem": pem})
        return
    print_facts(facts)
    print(pem, end="")
