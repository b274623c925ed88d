"""Fetch a verified image into the local engine, and run a command in it.

In: `Verified` (stackcheck.certificate.verify), an engine. Out: the name of exactly that digest in the engine,
or the exit code of a command that sees one folder and the devices of the host, and nothing else of it.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

from stackcheck.certificate.statement import accepted_python
from stackcheck.certificate.verify import Verified, as_certificate_error, image_blobs
from stackcheck.engine.client import Engine
from stackcheck.errors import EngineError, FileError
from stackcheck.imaging.image import Image
from stackcheck.matrix.stack import Stack
from stackcheck.oci import tags
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.layout import OciLayout
from stackcheck.oci.store import Store, copy_blob
from stackcheck.oci.stores import open_store
from stackcheck.policy import Policy
from stackcheck.suite import subject as subjects
from stackcheck.suite.subject import Subject
from stackcheck.vendors import Vendor


def local_name(verified: Verified) -> str:
    """The name of a certified image in the engine."""
    return tags.local_name(verified.stack_id, verified.config_digest)


def pull(
    verified: Verified, engine: Engine, *, report: Callable[[str], None], plain_http: bool = False
) -> str:
    """Fetch a verified image into the local engine, unless it is there, and return its name there.

    Every blob is checked while it is copied, and the engine reads the copy: a change in the store after
    `verify` cannot reach it.

    Raises:
        CertificateError: The store does not hold what was certified.
        FileError: The folder for temporary files has no room for the image.
        EngineError: The engine refused the image, or the loaded image has a different digest.
    """
    name = local_name(verified)
    if _is_there(engine, name, verified):
        report(f"{name} is in the engine already")
        return name
    store = open_store(verified.reference.target, plain_http=plain_http)
    with tempfile.TemporaryDirectory(prefix="stackcheck-pull-") as folder:
        layout = OciLayout(Path(folder))
        try:
            _fetch(store, verified.digest, layout, report)
        except FileError as error:
            raise error.but(
                FileError,
                expected="room for the image's compressed layers",
                next_step="free disk space there, or name another folder: TMPDIR=FOLDER stackcheck pull …",
            ) from error
        except RegistryError as error:
            raise as_certificate_error(error, str(verified.reference)) from error
        engine.load(layout.root, name)
    if not _is_there(engine, name, verified):
        raise EngineError(
            "the engine's image is not the one that was verified",
            where=name,
            got=engine.inspect(name).id,
            expected=f"{verified.config_digest} or {verified.digest}",
            next_step=f"remove the image and pull it again: docker image rm {name}",
        )
    return name


def pulled_subject(
    verified: Verified,
    engine: Engine,
    policy: Policy,
    *,
    name: str,
    vendor: Vendor,
    layout: Path,
    stack: Stack | None = None,
    report: Callable[[str], None],
    plain_http: bool = False,
) -> Subject:
    """A published image as the suites run in it: exactly the certified bytes.

    Without a stack no machine is named, and no waiver applies. Its Python may be of no package only if the
    certificate accepts that. Nothing reads `layout`, as the image stays in its store.

    Raises:
        CertificateError: The store does not hold what was certified.
        EngineError: The engine refused the image.
    """
    loaded = pull(verified, engine, report=report, plain_http=plain_http)
    image = Image(
        stack_id=verified.stack_id,
        reference=engine.inspect(loaded).id,  # a name may move between the runs
        config_digest=verified.config_digest,
        manifest_digest=verified.digest,
        layout=layout,
        size_bytes=0,
        layers=(),
        reused=True,
        seconds=0.0,
    )
    accepted = accepted_python(verified.facts)
    return subjects.of_image(image, policy, stack, name=name, vendor=vendor, accepted_python=accepted)


def _fetch(store: Store, digest: str, layout: OciLayout, report: Callable[[str], None]) -> None:
    manifest = store.read_manifest(digest)
    with layout.writing(report):
        for blob in image_blobs(manifest):
            report(f"fetching {blob.digest[:19]} ({blob.size / 1e6:.1f} MB)")
            copy_blob(blob, store, layout, report)
        layout.write_manifest(manifest, digest)


def _is_there(engine: Engine, name: str, verified: Verified) -> bool:
    """Whether the engine has the verified image. Its id is a config or a manifest digest, by image store."""
    return engine.has(name) and engine.inspect(name).id in {verified.config_digest, verified.digest}
