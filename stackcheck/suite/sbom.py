"""The packages that an image really holds, as a CycloneDX document.

In: an image of the engine. Out: its Python distributions and Debian packages with versions, licences and
package URLs, read from its own file system by `stackcheck.suite.inventory`, never from the matrix. Equal
images give equal bytes: serial number and date come from the image. https://cyclonedx.org/docs/1.6/json/
"""

from __future__ import annotations

import datetime as dt
import json
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from stackcheck import __version__
from stackcheck.engine.client import Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.oci import archive
from stackcheck.oci.documents import RegistryError, compact_json, json_object
from stackcheck.suite import components

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stackcheck.build.image import Image
    from stackcheck.engine.client import Engine

TIMEOUT_S = 300
READER = Path(__file__).with_name("inventory.py")
PROGRAM = "/stackcheck/suite/inventory.py"


def keep(image: Image, engine: Engine, folder: Path, report: Callable[[str], None]) -> dict[str, Any]:
    """The document of an image: the one that lies in its folder, or a new one when that is another image's.

    Raises:
        ChecksFailedError: The image's Python could not list what is in it.
        ConfigurationError: The file could not be written.
    """
    path = folder / "sbom.json"
    if _is_of(kept := _stored(path), image):
        return kept
    records = read(image.reference, engine)
    try:
        document = describe(image, records)
    except (KeyError, ValueError, TypeError, AttributeError) as error:  # whatever the image's python3 wrote
        raise ChecksFailedError(
            "what is in the image could not be listed",
            where=image.reference,
            got=f"records that cannot be used: {error!r}"[:300],
            expected="a python3 in the image that runs stackcheck's own program",
        ) from error
    write_atomically(path, (compact_json(document),))
    report(f"{folder.name}: {len(document['components'])} packages are in the image")
    return document


def load(image: Image, folder: Path) -> dict[str, Any]:
    """The document that `keep` left for an image.

    Raises:
        ConfigurationError: There is none, or it is about another image.
    """
    path = folder / "sbom.json"
    document = _stored(path)
    if not _is_of(document, image):
        raise ConfigurationError(
            "there is no list of what is in the image",
            where=str(path),
            expected=image.manifest_digest,
            next_step=f"stackcheck certify {folder.name}",
        )
    return document


def read(reference: str, engine: Engine) -> list[dict[str, Any]]:
    """What an image's file system holds, one record a package; see `stackcheck.suite.inventory`.

    It is read as root, without any capability: what root alone may read is read, and nothing can be changed.
    """
    lines: list[str] = []
    spec = RunSpec(
        image=reference,
        command=("python3", "-I", "-S", "-B", PROGRAM),
        user="0:0",
        env=USER_ENV,
        mounts=(Mount(source=READER, target=PROGRAM),),
        timeout_s=TIMEOUT_S,
        on_line=lines.append,
    )
    code = engine.run(spec)
    try:
        records = [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError):
        records = []
    if code or not records or records[-1].get("kind") != "end":
        raise ChecksFailedError(
            "what is in the image could not be listed",
            where=reference,
            got=f"exit code {code}; it wrote last:\n    " + "\n    ".join(line[:200] for line in lines[-5:]),
            expected="a python3 in the image that can read its file system",
        )
    return records


def describe(image: Image, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The CycloneDX document of an image whose file system gave these records. Pure but for the layout."""
    created = archive.read_json(image.layout, image.config_digest).get("created")
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


def _stored(path: Path) -> dict[str, Any]:
    """What a file holds; nothing, where it is not there or damaged: it can be made again."""
    try:
        return json_object(path.read_bytes(), str(path))
    except (FileNotFoundError, RegistryError):
        return {}


def _is_of(document: dict[str, Any], image: Image) -> bool:
    """Whether a document was made for this image, by this version of the tool."""
    try:
        metadata = document["metadata"]
        tools = [tool["version"] for tool in metadata["tools"]["components"]]
    except (KeyError, TypeError):
        return False
    return (metadata["component"]["version"], tools) == (image.manifest_digest, [__version__])
