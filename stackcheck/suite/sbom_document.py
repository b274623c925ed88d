"""The SBOM of an image. In: the image and the records of its packages. Out: a CycloneDX 1.6 document.

Equal images give equal bytes: serial number and date come from the image.
"""

import datetime as dt
import functools
import json
import re
import shlex
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.dependency import Dependency
from cyclonedx.model.license import DisjunctiveLicense, License, LicenseAcknowledgement, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.metadata import RawMetadata, parse_email
from packaging.utils import canonicalize_name

from stackcheck import __version__
from stackcheck.files import dpkg_status
from stackcheck.imaging.image import Image
from stackcheck.oci.image_layout import ImageLayout


def describe(image: Image, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The CycloneDX document of an image with these records. Reads only the image's config."""
    created = ImageLayout(image.layout).json(image.config_digest).get("created")
    moment = dt.datetime.fromisoformat(created) if created else dt.datetime.fromtimestamp(0, dt.UTC)
    unread = [folder for record in records if record["kind"] == "end" for folder in record["unread"]]
    container, found = _container(image), components(records)
    bom = Bom(
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"urn:stackcheck:sbom:{image.manifest_digest}"),
        metadata=BomMetaData(
            timestamp=moment,
            component=container,
            tools=ToolRepository(
                components=[Component(type=ComponentType.APPLICATION, name="stackcheck", version=__version__)]
            ),
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


Record = dict[str, Any]

# A longer text is the licence itself and not its name; then the classifiers name it.
LONGEST_NAME = 80
DECLARED = LicenseAcknowledgement.DECLARED
LICENCE_CLASSIFIER = "License :: "
UNKNOWN = "UNKNOWN"  # what setuptools writes for a missing field
_SHA256 = re.compile(r"[0-9a-f]{64}")


def components(records: Sequence[Record]) -> list[Component]:
    """The operating system and every package; a package that is installed twice is one component."""
    release = next((_assignments(item["text"]) for item in records if item["kind"] == "release"), {})
    found: dict[str, Component] = {}
    for component in (*_system(release), *_debian(records, release), *_python(records)):
        known = found.setdefault(str(component.bom_ref.value), component)
        known.properties.update(component.properties)
    return list(found.values())


def _system(release: Mapping[str, str]) -> Iterator[Component]:
    if "ID" in release:
        name, version = release["ID"], release.get("VERSION_ID", "")
        yield Component(
            type=ComponentType.OPERATING_SYSTEM,
            name=name,
            version=version,
            description=release.get("PRETTY_NAME"),
            bom_ref=f"os:{name}@{version}",
        )


def _debian(records: Sequence[Record], release: Mapping[str, str]) -> Iterator[Component]:
    licences = {item["package"]: item["stated"] for item in records if item["kind"] == "licences"}
    files = {item["package"]: item["digest"] for item in records if item["kind"] == "files"}
    origin = release.get("ID", "debian")
    distribution = {"distro": f"{origin}-{release['VERSION_ID']}"} if "VERSION_ID" in release else {}
    text = "\n\n".join(item["text"] for item in records if item["kind"] == "dpkg")
    for stanza, _ in dpkg_status.installed(text):
        name, version, arch = stanza["Package"], stanza.get("Version"), stanza.get("Architecture", "")
        purl = PackageURL("deb", origin, name, version, qualifiers={"arch": arch, **distribution})
        listed = files.get(name) or files.get(f"{name}:{arch}")
        yield Component(
            name=name,
            version=version,
            bom_ref=purl.to_string(),
            purl=purl,
            licenses=_licences(licences.get(name, ())),
            properties=_properties(source=stanza.get("Source"), files_sha256=listed),
        )


def _python(records: Sequence[Record]) -> Iterator[Component]:
    for item in records:
        if item["kind"] != "python":
            continue
        metadata, _unparsed = parse_email(item["head"])
        if not metadata.get("name") or not metadata.get("version"):
            continue  # a folder with such a name that is not a distribution
        purl = PackageURL("pypi", None, canonicalize_name(metadata["name"]), metadata["version"])
        yield Component(
            name=metadata["name"],
            version=metadata["version"],
            description=metadata.get("summary"),
            bom_ref=purl.to_string(),
            purl=purl,
            licenses=_licences(_stated(metadata)),
            hashes=_hashes(item.get("origin")),
            properties=_properties(place=item["place"], files_sha256=item.get("files")),
        )


def _stated(metadata: RawMetadata) -> list[str]:
    """The licences that a distribution declares: its licence expression, or else names."""
    if expression := metadata.get("license_expression"):
        return [expression]
    prefixed = (item for item in metadata.get("classifiers", ()) if item.startswith(LICENCE_CLASSIFIER))
    names = [item.rpartition(" :: ")[2] for item in prefixed]
    short = metadata.get("license", "").strip()
    is_name = short != UNKNOWN and 0 < len(short) <= LONGEST_NAME and "\n" not in short
    return [short] if is_name and not names else [name for name in names if name != "OSI Approved"]


def _licences(stated: Iterable[str]) -> list[License]:
    """Licences as CycloneDX allows them: one expression, or any number of SPDX ids and names."""
    names = sorted(set(stated))
    made = [_licence(name) for name in names]
    if len(made) == 1:
        return made
    return [
        DisjunctiveLicense(name=name, acknowledgement=DECLARED)
        if isinstance(item, LicenseExpression)
        else item
        for name, item in zip(names, made, strict=True)
    ]


@functools.cache
def _licence(name: str) -> License:
    """One licence; cached, because many packages share one and parsing an expression takes milliseconds."""
    return LicenseFactory().make_from_string(name, license_acknowledgement=DECLARED)


def _hashes(origin: str | None) -> list[HashType]:
    """The wheel's hash where pip recorded it; https://packaging.python.org/specifications/direct-url/."""
    try:
        document = json.loads(origin or "null")
    except ValueError:  # invalid direct_url.json: ignore it, pip did not write it
        return []
    match document:
        case {"archive_info": {"hashes": {"sha256": str(digest)}}} if _SHA256.fullmatch(digest):
            return [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    return []


def _properties(**values: str | None) -> list[Property]:
    return [Property(name=f"stackcheck:{name}", value=value) for name, value in values.items() if value]


def _assignments(text: str) -> dict[str, str]:
    """The shell assignments of os-release."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an unclosed quote: a shell could not read the file either
        return {}
    return {name: value for name, _, value in (word.partition("=") for word in words) if value}
