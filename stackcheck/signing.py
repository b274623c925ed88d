"""The signed statements about a judged image, as they lie in its folder before they are published.

In: a candidate with its result and verdict. Out: envelopes, in `build/<name>/statements/`.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING

from stackcheck import certificate, keys, sbom
from stackcheck.durable import write_atomically
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from stackcheck.candidate import Candidate, Settings
    from stackcheck.results import RunResult
    from stackcheck.verdict import Verdict


def sign(
    subject: Candidate, result: RunResult, judged: Verdict, settings: Settings
) -> tuple[certificate.Envelope, ...]:
    """Sign the statements about a judged image and keep them under `build/`."""
    envelopes = certificate.certify(
        subject.image,
        result,
        judged,
        subject.provenance,
        sbom.load(subject.image, settings.folder(subject.name)),
        key=keys.load_or_create(settings.key),
        now=dt.datetime.now(dt.UTC),
        experimental=subject.experimental,
    )
    folder = settings.folder(subject.name) / "statements"
    for old in folder.glob("*.json"):
        old.unlink()
    for number, envelope in enumerate(envelopes):
        write_atomically(folder / f"{number}.dsse.json", (envelope.body,), failure=ConfigurationError)
    return envelopes


def signed(name: str, settings: Settings) -> tuple[certificate.Envelope, ...]:
    """The statements that `certify` left for a stack or image.

    Raises:
        ConfigurationError: There are none.
        CertificateError: Another key signed them.
    """
    paths = sorted((settings.folder(name) / "statements").glob("*.dsse.json"))
    if not paths:
        raise ConfigurationError(
            "there is no certificate to publish",
            where=str(settings.folder(name) / "statements"),
            next_step=f"stackcheck certify {name}",
        )
    public = keys.load_or_create(settings.key).public_key()
    return tuple(certificate.open_envelope(path.read_bytes(), public) for path in paths)
