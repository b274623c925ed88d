"""The SBOM of an image. In: the image and the records of its packages. Out: a CycloneDX 1.6 document.

Equal images give equal bytes: serial number and date come from the image.
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import TYPE_CHECKING, Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from stackcheck import __version__
from stackcheck.oci.image_layout import ImageLayout
from stackcheck.suite import components

if TYPE_CHECKING:
    from collections.abc import Sequence

    from stackcheck.imaging.image import Image


def describe(image: Image, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The CycloneDX document of an image with these records. Reads only the image's config."""
    created = ImageLayout(image.layout).json(image.config_digest).get("created")
    moment = dt.datetime.fromisoformat(created) if created else dt.datetime.fromtimestamp(0, dt.UTC)
    unread = [folder for record in records if record["kind"] == "end" for folder in record["unread"]]
    container, found = _container(image), components.components(records)
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"urn:stackcheck:sbom:{image.manifest_digest}"),
        metadata=BomMetaData(
            timestamp=moment,
            component=container,
            tools=ToolRepository(components=[_tool()]),
        ),
        components=found,
        # The library's own `register_dependency` takes seconds for a thousand packages.
        dependencies=[Dependency(container.bom_ref, [Dependency(item.bom_ref) for item in found])],
        properties=[Property(name="stackcheck:unread", value=folder) for folder in unread],
    )
    document: dict[str, Any] = json.loads(JsonV1Dot6(bom).output_as_string())
    return document


def _container(image: Image) -> Component:
    name = image.stack_id or "image"
    return Component(
        type=ComponentType.CONTAINER,
        name=name,
        version=image.manifest_digest,
        bom_ref=image.manifest_digest,
        purl=PackageURL(type="oci", name=name, version=image.manifest_digest),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=image.manifest_digest.removeprefix("sha256:"))],
    )


def _tool() -> Component:
    return Component(type=ComponentType.APPLICATION, name="stackcheck", version=__version__)
