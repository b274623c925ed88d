"""Signatures of an identity, not of a key. In: a sigstore bundle (v0.3), who is trusted. Out: an `Envelope`.

The bundle has the certificate of the identity, and the entry of the log with its proof. The authority, the
logs and their keys are in a trusted root file, which the reader names as he names a public key: nothing is
asked of a network. `sigstore` (the extra `keyless`) checks all of it; its errors are of many kinds, so any of
them refuses the bundle. Formats: https://github.com/sigstore/protobuf-specs.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cryptography.x509 import Certificate, Name, load_der_x509_certificate
from pydantic import Field, StringConstraints

from stackcheck.certificate import statement
from stackcheck.certificate.keys import require_own
from stackcheck.certificate.statement import PAYLOAD_TYPE, Envelope
from stackcheck.certificate.storage_forms import BUNDLE
from stackcheck.errors import CertificateError, ConfigurationError
from stackcheck.files import strictjson, yamlfile
from stackcheck.files.border import Closed

if TYPE_CHECKING:
    from sigstore.models import Bundle
    from sigstore.oidc import IdentityToken

PUBLIC = "public"  # the public instance of sigstore, in place of a file
Word = Annotated[str, StringConstraints(min_length=1)]


class TrustedIdentity(Closed):
    """Who may sign: the name in the certificate, exactly, and who vouched for it."""

    identity: Word
    issuer: Word

    def words(self) -> str:
        """The identity and its issuer as text, for tables and as the signer of a bundle."""
        return f"{self.identity} ({self.issuer})"


class IdentityFile(Closed):
    """A file of those who may sign; the trusted root is a file beside it."""

    trusted_root: Annotated[str, StringConstraints(pattern=r"^[\w.-]+$")]
    identities: Annotated[tuple[TrustedIdentity, ...], Field(min_length=1)]


@dataclass(frozen=True, kw_only=True)
class Identities:
    """Who may sign, and the file with the authorities and logs that are believed."""

    root: Path
    trusted: tuple[TrustedIdentity, ...]

    def verify(self, certificate: Certificate) -> None:
        """Refuse the certificate of anybody else: sigstore's `VerificationPolicy`."""
        self.named(certificate)

    def named(self, certificate: Certificate) -> TrustedIdentity:
        """The first trusted identity that a certificate names.

        Raises:
            VerificationError: It names none.
        """
        from sigstore.errors import VerificationError
        from sigstore.verify.policy import AllOf, AnyOf, Identity, OIDCIssuer, OIDCIssuerV2

        for one in self.trusted:
            issuer = AnyOf([OIDCIssuerV2(one.issuer), OIDCIssuer(one.issuer)])
            try:
                AllOf([Identity(identity=one.identity), issuer]).verify(certificate)
            except VerificationError:
                continue
            return one
        raise VerificationError("the certificate names another identity, or another issuer")


def load_identities(path: Path) -> Identities:
    """Read a file of those who may sign.

    Raises:
        ConfigurationError: It is wrong, or others can replace it or the trusted root.
    """
    found = yamlfile.validated(IdentityFile, yamlfile.load_yaml(path), path.name)
    root = path.with_name(found.trusted_root)
    if not root.is_file():
        raise ConfigurationError(
            "there is no trusted root",
            where=str(path),
            got=f"no file {root}",
            expected="trusted_root: FILE, a trusted_root.json of sigstore beside this file",
        )
    for file in (path, root):
        require_own(file)
    return Identities(root=root, trusted=found.identities)


def is_bundle(body: bytes) -> bool:
    """Whether a signed file has the form of a bundle; `open_bundle` decides whether it is one."""
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and "mediaType" in document


def open_bundle(body: bytes, trusted: Identities) -> Envelope:
    """Check a bundle against the trusted root and identities, without a network, and read its statement.

    Raises:
        CertificateError: Certificate, log entry, proof, time, signature, identity or issuer is not accepted.
    """
    _require_library()
    from sigstore.models import Bundle, TrustedRoot
    from sigstore.verify import Verifier

    try:
        verifier = Verifier(trusted_root=TrustedRoot.from_file(str(trusted.root)))
    except Exception as error:  # as in the docstring of this module
        raise ConfigurationError(
            "the trusted root cannot be used", where=str(trusted.root), got=_words(error)
        ) from error
    try:
        strictjson.check(body)
        if (kind := json.loads(body)["mediaType"]) != BUNDLE:
            raise ValueError(f"a bundle of the kind {kind}")
        bundle = Bundle.from_json(body)
        payload_type, payload = verifier.verify_dsse(bundle, trusted)
        _require_in_time(bundle, json.loads(body), json.loads(trusted.root.read_bytes()))
        if payload_type != PAYLOAD_TYPE:
            raise ValueError(f"a payload of the type {payload_type}")
        signer = trusted.named(bundle.signing_certificate)
    except Exception as error:
        raise CertificateError(
            "a keyless signature is not accepted",
            got=_words(error),
            expected=f"a bundle {BUNDLE} of {' or '.join(one.words() for one in trusted.trusted)}",
            next_step=f"compare the authority and the logs with those in {trusted.root}",
        ) from error
    return Envelope(statement=statement.parse(payload), body=body, signer=signer.words())


def _require_in_time(bundle: Bundle, document: Any, root: Any) -> None:
    """Refuse a log or an authority that the trusted root no longer names for the time of the signature.

    sigstore-python takes keys of any age, as they were valid once.

    Raises:
        ValueError: It names none for this time.
    """
    (entry,) = document["verificationMaterial"]["tlogEntries"]
    stamps = bundle.verification_material.timestamp_verification_data
    times = [one.tst_info.gen_time for one in stamps.rfc3161_timestamps] if stamps else []
    if "integratedTime" in entry:
        times.append(dt.datetime.fromtimestamp(int(entry["integratedTime"]), dt.UTC))
    issuer, log = bundle.signing_certificate.issuer, entry["logId"]["keyId"]
    parts = {
        "log": [one["publicKey"]["validFor"] for one in root["tlogs"] if one["logId"]["keyId"] == log],
        "authority": [
            one["validFor"] for one in root["certificateAuthorities"] if issuer in _subjects(one["certChain"])
        ],
    }
    for name, periods in parts.items():
        if not times or not any(all(_within(time, period) for time in times) for period in periods):
            raise ValueError(
                f"the trusted root has no {name} for this signature at {', '.join(map(str, times))}"
            )


def _subjects(chain: Any) -> list[Name]:
    raw = (base64.b64decode(one["rawBytes"]) for one in chain["certificates"])
    return [load_der_x509_certificate(each).subject for each in raw]


def _within(time: dt.datetime, period: Mapping[str, str]) -> bool:
    begin, end = (
        dt.datetime.fromisoformat(period[name]) if name in period else None for name in ("start", "end")
    )
    return (begin is None or begin <= time) and (end is None or time <= end)


def sign(found: statement.Statement, instance: str) -> bytes:
    """The bundle of a statement, signed as the identity that this process or its user has.

    `instance` is `public`, or a file: a ClientTrustConfig of sigstore, with the services of a site.

    Raises:
        ConfigurationError: There is no identity, or a service does not answer or refuses.
    """
    _require_library()
    if instance != PUBLIC and not Path(instance).is_file():
        raise ConfigurationError(
            "--keyless names a file that does not exist",
            got=instance,
            expected=f"`{PUBLIC}`, or a ClientTrustConfig of sigstore",
            next_step=f"correct the path, or --keyless {PUBLIC}",
        )
    from sigstore.dsse import Statement
    from sigstore.models import ClientTrustConfig
    from sigstore.sign import SigningContext

    try:
        config = (
            ClientTrustConfig.production()
            if instance == PUBLIC
            else ClientTrustConfig.from_json(Path(instance).read_text("utf-8"))
        )
        with SigningContext.from_trust_config(config).signer(_token(config)) as signer:
            made: str = signer.sign_dsse(Statement(found.payload)).to_json()
    except Exception as error:
        raise ConfigurationError(
            "the statement cannot be signed without a key",
            where=instance,
            got=_words(error),
            expected="an identity (of the workflow, or of you in a browser), and services that answer",
            next_step="sign with a key: leave --keyless out",
        ) from error
    return made.encode()


def _require_library() -> None:
    if find_spec("sigstore") is None:
        raise ConfigurationError(
            "signatures without a key need sigstore",
            got="it is not installed",
            expected="the extra `keyless` of stackcheck",
            next_step="pip install 'stackcheck[keyless]'",
        )


def _token(config: Any) -> IdentityToken:
    """The token of the workflow that this runs in; without one, the user is asked in a browser."""
    from sigstore.oidc import IdentityToken, Issuer, detect_credential

    found = detect_credential()
    return IdentityToken(found) if found else Issuer(config.signing_config.get_oidc_url()).identity_token()


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
