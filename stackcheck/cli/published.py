"""The verbs that change published images: promote, revoke, gc.

In: a reference, or a layout. Out: what was copied, revoked or removed.
"""

import datetime as dt
from pathlib import Path
from typing import Annotated

from stackcheck.certificate import key_sources, signers
from stackcheck.cli import options as opt
from stackcheck.cli.output import Progress, counted, print_facts, print_json, print_note
from stackcheck.errors import ConfigurationError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import parse_reference, parse_target
from stackcheck.oci.stores import open_store
from stackcheck.oci.tags import is_unique

app = opt.new_app()


@app.command("promote")
def promote_image(
    reference: opt.Ref,
    *,
    to: Annotated[str, opt.option("--to TARGET", "Where to copy it: oci:DIR or HOST/REPO.")],
    key: opt.PublicKey = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Copy a certified image and its certificate to another target; the digest stays the same."""
    from stackcheck.certificate import publish

    target = parse_target(to)
    public_key = key_sources.public(key)
    if dry_run:
        print(f"{reference}: copy image and certificate to {target}, then move the tag")
        return
    done = publish.promote(
        reference, target=target, public_key=public_key, report=Progress(), plain_http=plain_http
    )
    facts = {
        "reference": str(done.reference),
        "unique": str(done.unique),
        "digest": done.digest,
        "next": f"stackcheck verify {done.reference}",
    }
    if as_json:
        print_json(facts)
        return
    print_facts(facts)
    print_note(f"a revocation does not follow a copy: revoke it in each target, also in {target}")


@app.command("revoke")
def revoke_image(
    reference: opt.Ref,
    *,
    reason: Annotated[
        str, opt.option("--reason TEXT", "Why; it is signed, and `verify` shows it to all users.")
    ],
    key: opt.SigningKey = None,
    sign_with: opt.SignWith = None,
    plain_http: opt.PlainHttp = False,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
) -> None:
    """Revoke a certificate: sign a FAILED verdict, then move floating tags back to a certified image."""
    from stackcheck.certificate.revoke import revoke

    signing_key = signers.choose(opt.key_path(key, sign_with), opt.sign_words(sign_with))
    _require_one_image(reference, plain_http=plain_http)
    if dry_run:
        print(f"{reference}: attach a FAILED verdict ({reason}), then move its floating tags back")
        return
    now = dt.datetime.now(dt.UTC)
    done = revoke(
        reference, reason=reason, key=signing_key, now=now, report=Progress(), plain_http=plain_http
    )
    facts = {"digest": done.digest, "moved": done.moved, "removed": done.removed, "left": done.left}
    if as_json:
        print_json(facts)
        return
    print_facts({name: _listed(value) for name, value in facts.items() if value})
    if done.left:
        print("note: no earlier image is certified, so these tags still name it; `verify` refuses them")


def _require_one_image(reference: str, *, plain_http: bool) -> None:
    """A floating tag moves when its image is revoked: the same command again would revoke the one before.

    Raises:
        ConfigurationError: The reference has neither a digest nor a tag that stays.
    """
    found = parse_reference(reference)
    if found.digest or (found.tag and is_unique(found.tag)):
        return
    digest = open_store(found.target, plain_http=plain_http).read_manifest(found.name).digest
    raise ConfigurationError(
        "name the image to revoke by its digest: the tag moves to another image when it is revoked",
        where=reference,
        got=f"the tag {found.tag}",
        expected=f"{found.target}@{digest}, which it names now",
        next_step=f"stackcheck revoke {found.target}@{digest} --reason TEXT",
    )


def _listed(value: object) -> str:
    """The tags in words, separated by commas."""
    match value:
        case dict():
            return ", ".join(f"{tag} -> {digest}" for tag, digest in value.items())
        case tuple():
            return ", ".join(value)
    return str(value)


@app.command("gc")
def collect_garbage(
    target: Annotated[
        str | None, opt.argument("oci:DIR", "The OCI image layout to clean.", "`publish` in matrix.yaml")
    ] = None,
    *,
    as_json: opt.AsJson = False,
    dry_run: opt.DryRun = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Remove the blobs of a layout on disk that no tag, manifest or attestation references."""
    layout = _layout(target, root)
    garbage = layout.unreferenced() if dry_run else layout.collect_garbage(Progress())
    size_bytes = sum(garbage.values())
    if as_json:
        blobs = [{"digest": digest, "size_bytes": size} for digest, size in garbage.items()]
        print_json({"target": layout.target, "removed": not dry_run, "bytes": size_bytes, "blobs": blobs})
        return
    done = "would remove" if dry_run else "removed"
    count, size = counted(len(garbage), "blob"), counted(size_bytes, "byte")
    print(f"{layout.target}: {done} {count}, {size} ({size_bytes / 1e6:.1f} MB)")


def _layout(target: str | None, root: Path) -> OciLayout:
    named = opt.target_of(root, target)
    if not named.startswith("oci:"):
        raise ConfigurationError(
            "gc cleans OCI image layouts only",
            got=named,
            expected="oci:DIR",
            next_step="use the registry's own garbage collection",
        )
    return OciLayout(Path(named.removeprefix("oci:")))
