"""Certified images of a few kilobytes: a layout on disk, a key, and statements about it."""

import dataclasses
import datetime as dt
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

import result_files
from stackcheck.certificate import predicates, publish
from stackcheck.certificate.statement import Envelope
from stackcheck.oci.documents import OCI_MANIFEST, Descriptor, Manifest, compact_json, sha256
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Store
from stackcheck.policy import Waiver
from stackcheck.suite import results, verdict
from stackcheck.suite.bounds import Bound, BoundClass, Bounds
from stackcheck.suite.requirements import Requirements
from stackcheck.suite.subject import Provenance

STACK_ID = "cpu-torch2.13.0-py3.11-debian12"
NOW = dt.datetime(2026, 3, 4, 5, 6, 7, tzinfo=dt.UTC)
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar"


@dataclasses.dataclass(frozen=True)
class SmallImage:
    layout: Path
    manifest_digest: str
    config_digest: str
    stack_id: str | None = STACK_ID


def quiet(_message: str) -> None:
    """Drop the lines of progress."""


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def put(store: Store, media_type: str, body: bytes) -> dict[str, Any]:
    blob = Descriptor(media_type=media_type, digest=sha256(body), size=len(body))
    store.write_blob(blob, lambda: (body,))
    return blob.as_json()


def put_image(
    store: Store,
    config: Mapping[str, Any],
    layers: Sequence[bytes],
    *,
    diff_ids: Sequence[str] = (),
    layer_type: str = LAYER_TYPE,
    tag: str = "candidate",
) -> Manifest:
    """An image of these layers under a tag: its manifest; `diff_ids` are those of layers that are packed."""
    rootfs = {"type": "layers", "diff_ids": [*diff_ids] or [sha256(layer) for layer in layers]}
    with store.writing(quiet):
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": put(store, CONFIG_TYPE, compact_json({**config, "rootfs": rootfs})),
            "layers": [put(store, layer_type, layer) for layer in layers],
        }
        manifest = Manifest(media_type=OCI_MANIFEST, body=compact_json(document))
        store.write_manifest(manifest, tag)
    return manifest


def linux(layers: int, **settings: Any) -> dict[str, Any]:
    """The config of an image for this platform, with so many layers."""
    history = [{"created_by": "a test"}] * layers
    return {"architecture": "amd64", "os": "linux", "config": settings, "history": history}


def make_image(folder: Path, content: bytes = b"first", stack_id: str | None = STACK_ID) -> SmallImage:
    """An image with two layers, tars with one file each; different content gives a different digest."""
    layers = [tar_of("etc/content", content), tar_of("etc/same", b"same in every image")]
    manifest = put_image(OciLayout(folder), linux(2, Env=["PYTORCH_VERSION=2.13.0"]), layers)
    return SmallImage(folder, manifest.digest, manifest.document["config"]["digest"], stack_id)


def tar_of(name: str, content: bytes) -> bytes:
    import io
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo(name)
        entry.size = len(content)
        tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def sbom_of(image: SmallImage) -> dict[str, Any]:
    """A minimal SBOM of the real form; `suite/test_sbom.py` makes real ones."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "metadata": {"component": {"type": "container", "name": "image", "version": image.manifest_digest}},
        "components": [{"type": "library", "name": "torch", "version": "2.13.0+cpu"}],
    }


def judged_run(
    image: SmallImage,
    *,
    now: dt.datetime = NOW,
    outcome: str = "passed",
    host: dict[str, Any] | None = None,
    waivers: tuple[Waiver, ...] = (),
    config_digest: str | None = None,
    tier: str | None = None,
    bound_class: BoundClass | None = None,
) -> tuple[results.RunResult, verdict.Verdict]:
    """A run that took a minute and ended at `now`, and its verdict."""
    checks = [result_files.check("test_a.py::test_one[1]")]
    checks.append(result_files.check("test_a.py::test_one[2]", outcome, metrics=[result_files.metric()]))
    document = result_files.result(
        *checks,
        started=(now - dt.timedelta(seconds=60)).isoformat(),
        finished=now.isoformat(),
        host=host or result_files.host(),
        tier=tier or ("standard" if host and host["vendor"] != "cpu" else "smoke"),
        image={
            "reference": "stackcheck/x:1",
            "config_digest": config_digest or image.config_digest,
            "manifest_digest": image.manifest_digest,
        },
    )
    run = results.parse(json.dumps(document).encode())
    ids = tuple(str(item["id"]) for item in checks)
    needed = Requirements(checks=ids, image_config_digest=image.config_digest, waivers=waivers)
    found = Bound(bound=5.0, direction="min", unit="GB/s", kind=bound_class or "measured")
    return run, verdict.judge(run, needed, Bounds({(ids[1], 0): found} if bound_class else {}))


def certify(
    image: SmallImage,
    key: ec.EllipticCurvePrivateKey,
    *,
    now: dt.datetime = NOW,
    archs: tuple[str, ...] = (),
    known_issues: tuple[dict[str, Any], ...] = (),
    name: str | None = None,
    parameters: dict[str, str] | None = None,
    derived: dict[str, Any] | None = None,
    **changes: Any,
) -> tuple[Envelope, ...]:
    """The signed statements of a run that ended just before `now`; `judged_run` takes the changes."""
    run, judged = judged_run(image, now=now, **changes)
    provenance = Provenance(
        parameters=parameters or {"stack": STACK_ID},
        dependencies={"file:Dockerfile": result_files.DIGEST},
        started=now,
    )
    return predicates.certify(
        *(image, run, judged, provenance, sbom_of(image)),
        key=key,
        terms=predicates.Terms(
            now=now,
            archs=archs,
            known_issues=known_issues,
            name=image.stack_id if name is None else name,
            derived=derived,
        ),
    )


def tags_of(dist: Path) -> dict[str, str]:
    """The tags that users see, without those of the attestations."""
    store = OciLayout(dist)
    names = store.tags() if (dist / "index.json").exists() else ()
    return {
        name: store.read_manifest(name).digest for name in names if not name.startswith(("cert-", "sha256-"))
    }


def target_of(to: Path | str) -> str:
    """A target by its name, or a layout on disk as one."""
    return to if isinstance(to, str) else f"oci:{to}"


def release(
    image: SmallImage, to: Path | str, key: Any, *, tag: str = STACK_ID, **changes: Any
) -> publish.Published:
    """Publish into a layout on disk or a target by name, with the given envelopes or those of `certify`."""
    envelopes = changes.pop("envelopes", None) or certify(image, key, **changes)
    return publish.publish(
        image.layout,
        tag=tag,
        envelopes=envelopes,
        target=target_of(to),
        public_key=key.public_key(),
        report=quiet,
        key=key,
    )


def promote(reference: str, to: Path | str, key: Any, **changes: Any) -> publish.Published:
    return publish.promote(
        reference, target=target_of(to), public_key=key.public_key(), report=quiet, **changes
    )


def copy_to(store: Any, image: SmallImage, envelopes: Sequence[Envelope], key: Any) -> None:
    """Copy an image and its statements into a store that is open, and tag it."""
    source = OciLayout(image.layout)
    publish.copy_and_tag(
        *(source, source.only_manifest(), envelopes, store),
        tag=STACK_ID,
        public_key=key.public_key(),
        report=quiet,
        key=key,
    )
