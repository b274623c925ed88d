"""An image that only has a reference, as the subject of a run: without a stack, on any machine."""

from pathlib import Path

import result_files
from stackcheck.imaging.image import Image
from stackcheck.policy import Policy
from stackcheck.suite.subject import Provenance, Subject
from stackcheck.vendors import Vendor


def subject_of(reference: str, folder: Path, *accepted: str, vendor: Vendor = "cpu") -> Subject:
    """The image of this reference, whose layout would be in `folder`; digests that may be its Python."""
    image = Image(
        stack_id=None,
        reference=reference,
        config_digest=result_files.CONFIG_DIGEST,
        manifest_digest=result_files.DIGEST,
        layout=folder / "oci",
        size_bytes=0,
        layers=(),
        reused=False,
        seconds=0.0,
    )
    return Subject(
        name="some",
        image=image,
        vendor=vendor,
        policy=Policy(certifies={"cpu": "smoke"}),
        stack=None,
        machines=None,
        provenance=Provenance(),
        accepted_python=accepted,
    )
