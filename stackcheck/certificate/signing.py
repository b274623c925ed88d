"""The signed statements of an image, as files before they are published.

In: an image, its result and verdict, a key. Out: envelopes, in `build/<name>/statements/`.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from stackcheck.certificate import keys, predicates
from stackcheck.certificate.statement import Envelope, open_envelope
from stackcheck.errors import ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.suite import sbom

if TYPE_CHECKING:
    from pathlib import Path

    from stackcheck.suite.results import RunResult
    from stackcheck.suite.subject import Subject
    from stackcheck.suite.verdict import Verdict


def sign(
    subject: Subject, result: RunResult, judged: Verdict, folder: Path, key: Path
) -> tuple[Envelope, ...]:
    """Sign the statements and write them to `folder/statements/`; earlier ones are removed.

    Raises:
        ConfigurationError: The key or a file cannot be read or written.
        MachineUnfitError: The verdict is UNFIT.
    """
    envelopes = predicates.certify(
        subject.image,
        result,
        judged,
        subject.provenance,
        sbom.load(subject.image, folder),
        key=keys.load_or_create(key),
        now=dt.datetime.now(dt.UTC),
        experimental=subject.experimental,
    )
    for old in (folder / "statements").glob("*.json"):
        old.unlink()
    for number, envelope in enumerate(envelopes):
        path = folder / "statements" / f"{number}.dsse.json"
        write_atomically(path, (envelope.body,))
    return envelopes


def signed(folder: Path, key: Path) -> tuple[Envelope, ...]:
    """The statements that `sign` left in `folder/statements/`.

    Raises:
        ConfigurationError: There are none.
        CertificateError: They were signed with another key.
    """
    paths = sorted((folder / "statements").glob("*.dsse.json"))
    if not paths:
        raise ConfigurationError(
            "there is no certificate to publish",
            where=str(folder / "statements"),
            expected="the signed statements that `stackcheck certify` writes",
            next_step=f"stackcheck certify {folder.name}",
        )
    public = keys.load_or_create(key).public_key()
    return tuple(open_envelope(path.read_bytes(), public) for path in paths)
