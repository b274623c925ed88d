"""List the packages in an image. In: an image of the engine. Out: its SBOM, a CycloneDX 1.6 document.

The SBOM has the Python distributions and Debian packages with versions, licences and package URLs.
`stackcheck.suite.inventory` reads them from the image's own file system, without regard to the matrix. Equal
images give equal bytes: serial number and date come from the image. https://cyclonedx.org/docs/1.6/json/
"""

import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from stackcheck import __version__
from stackcheck.engine.client import Engine, Mount, RunSpec
from stackcheck.engine.container import USER_ENV
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.imaging.image import Image
from stackcheck.oci.documents import compact_json, stored_json
from stackcheck.suite import answers, interpreter, steering
from stackcheck.suite.results import ReportedInterpreter

TIMEOUT_S = 300
INVENTORY = Path(__file__).with_name("inventory.py")
PROGRAM = "/stackcheck/suite/inventory.py"


def load_or_create(
    image: Image,
    engine: Engine,
    folder: Path,
    report: Callable[[str], None],
    *,
    accepted: Collection[str] = (),
) -> dict[str, Any]:
    """The SBOM of an image: the one in `folder` if it is of this image, else a new one, written there.

    `accepted` has the digests of files that may be the image's Python although no package owns them.

    Raises:
        ChecksFailedError: The image's Python belongs to no package, or could not list the packages.
    """
    path = folder / "sbom.json"
    if _is_of(stored := stored_json(path), image):
        return stored
    from stackcheck.suite import sbom_document  # its library takes as long to load as all else

    found = interpreter.find(image.reference, engine, accepted)
    records = list_packages(image.reference, found, engine)
    try:
        document = sbom_document.describe(image, records)
    except (KeyError, ValueError, TypeError, AttributeError) as error:  # whatever the image's python3 wrote
        raise ChecksFailedError(
            "the packages in the image could not be listed",
            where=image.reference,
            got=f"invalid records: {error!r}"[:300],
            expected="the records that stackcheck/suite/inventory.py prints",
            next_step=f"see what its python3 is: docker run --rm {image.reference} python3 -V",
        ) from error
    interpreter.require_listed(found, document)
    write_atomically(path, (compact_json(document),))
    report(f"{folder.name}: {len(document['components'])} packages are in the image")
    return document


def load_sbom(image: Image, folder: Path) -> dict[str, Any]:
    """The SBOM that `load_or_create` wrote for an image.

    Raises:
        ConfigurationError: The file is missing, or it is of a different image or version of stackcheck.
    """
    path = folder / "sbom.json"
    document = stored_json(path)
    if not _is_of(document, image):
        raise ConfigurationError(
            "there is no SBOM of this image",
            where=str(path),
            got="an SBOM of a different image or stackcheck version" if document else "no readable file",
            expected=f"an SBOM of {image.manifest_digest}, by stackcheck {__version__}",
            next_step=f"stackcheck certify {folder.name}",
        )
    return document


def list_packages(reference: str, found: ReportedInterpreter, engine: Engine) -> list[dict[str, Any]]:
    """The records of an image's packages, as `stackcheck.suite.inventory` prints them.

    It runs as root without capabilities: it may read files that only root can read, and can change nothing.

    Raises:
        ChecksFailedError: The image has no usable python3, or the list is incomplete.
    """
    spec = RunSpec(
        image=reference,
        entrypoint=(found.path,),
        command=("-I", "-S", "-B", PROGRAM),
        user="0:0",
        env={**dict.fromkeys(filter(steering.is_neutralised, engine.inspect(reference).env)), **USER_ENV},
        mounts=(Mount(source=INVENTORY, target=PROGRAM),),
        timeout_s=TIMEOUT_S,
    )
    code, lines = answers.ask(engine, spec, lambda said: bool(_records(said)))
    records = _records(lines)
    if code or not records:
        raise ChecksFailedError(
            "the packages in the image could not be listed",
            where=reference,
            got=f"exit code {code}; last lines:\n    " + "\n    ".join(line[:200] for line in lines[-5:]),
            expected="a python3 in the image that can read its file system",
            next_step="install Python 3 in the image, then run the same command again",
        )
    return records


def _records(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The records of a complete list, whose last one says that it ends; empty for any other."""
    try:
        records = [dict(json.loads(line)) for line in lines]
    except (ValueError, TypeError, RecursionError):
        return []
    return records if records and records[-1].get("kind") == "end" else []


def _is_of(document: dict[str, Any], image: Image) -> bool:
    """Whether a document is of this image, made by this version of stackcheck."""
    try:
        metadata = document["metadata"]
        tools = [tool["version"] for tool in metadata["tools"]["components"]]
    except (KeyError, TypeError):
        return False
    return (metadata["component"]["version"], tools) == (image.manifest_digest, [__version__])
