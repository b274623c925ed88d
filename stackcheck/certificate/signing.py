"""Sign the statements about an image, and keep them as files until they are published.

In: an image, its result and verdict, a key. Out: envelopes, also in `build/<name>/statements/*.dsse.json`.
"""

import dataclasses
import datetime as dt
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stackcheck.certificate import predicates
from stackcheck.certificate.keyring import Pinned
from stackcheck.certificate.signers import Signer
from stackcheck.certificate.statement import Envelope, open_envelope
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.files.atomic import write_atomically
from stackcheck.suite import last_run
from stackcheck.suite.results import RunResult
from stackcheck.suite.subject import Subject
from stackcheck.suite.verdict import Verdict


def sign_to_files(
    subject: Subject,
    result: RunResult,
    judged: Verdict,
    folder: Path,
    key: Signer,
    *,
    sbom: Mapping[str, Any],
    files: Mapping[str, Any],
    against: Mapping[str, Any] | None = None,
    derived: Mapping[str, Any] | None = None,
) -> tuple[Envelope, ...]:
    """Sign the statements about a judged image and write them to `folder/statements/`, replacing older ones.

    Raises:
        ConfigurationError: The key cannot be used.
        FileError: A file cannot be written.
        MachineUnfitError: The verdict is UNFIT.
    """
    envelopes = predicates.certify(
        subject.image,
        result,
        judged,
        subject.provenance,
        sbom,
        key=key,
        terms=dataclasses.replace(
            terms(subject, judged, dt.datetime.now(dt.UTC), against, files), derived=derived
        ),
    )
    forget(folder)
    for number, envelope in enumerate(envelopes):
        path = folder / "statements" / f"{number}.dsse.json"
        write_atomically(path, (envelope.body,))
    return envelopes


def terms(
    subject: Subject,
    judged: Verdict,
    now: dt.datetime,
    against: Mapping[str, Any] | None,
    files: Mapping[str, Any] | None,
) -> predicates.Terms:
    """What a certificate of this subject says beside the run and its verdict."""
    return predicates.Terms(
        now=now,
        experimental=subject.experimental,
        archs=subject.stack.archs if subject.stack else (),
        known_issues=[issue.as_json() for issue in judged.known_issues],
        name=subject.name,
        against=against,
        files=files,
    )


def forget(folder: Path) -> None:
    """Remove the statements of an earlier verdict, so that nobody publishes them while a new one is made."""
    for old in (folder / "statements").glob("*.json"):
        old.unlink()


def require_signed(folder: Path) -> tuple[Path, ...]:
    """The files that `sign_to_files` wrote to `folder/statements/`.

    Raises:
        ConfigurationError: There are none.
    """
    paths = tuple(sorted((folder / "statements").glob("*.dsse.json")))
    if not paths:
        ran = last_run.last_run(folder)
        tested = f"; the newest run ({ran.tier}) is not certified: its state is `tested`" if ran else ""
        raise ConfigurationError(
            "there is no certificate to publish",
            where=str(folder / "statements"),
            got=f"no *.dsse.json file{tested}",
            expected="the signed statements that `stackcheck certify` writes",
            next_step=f"stackcheck certify {folder.name}",
        )
    return paths


def load_signed(folder: Path, public_key: Pinned) -> tuple[Envelope, ...]:
    """The envelopes that `sign_to_files` wrote to `folder/statements/`.

    Raises:
        ConfigurationError: There are none.
        CertificateError: One is damaged, or a different key signed it.
    """
    return tuple(_opened(path, public_key, folder.name) for path in require_signed(folder))


def _opened(path: Path, public_key: Pinned, name: str) -> Envelope:
    try:
        return open_envelope(path.read_bytes(), public_key)
    except CertificateError as error:
        raise error.but(
            CertificateError,
            where=str(path),
            next_step=f"name the key that signed it: --key PATH; or sign again: stackcheck certify {name}",
        ) from error
