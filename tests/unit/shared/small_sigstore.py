"""A sigstore of a test: an authority, the log of its certificates, and the log of signatures, with made keys.

In: identities, times. Out: bundles (v0.3), the trusted root that they are checked with, and services for
those who sign. Formats: RFC 6962 (trees, timestamps of certificates), https://github.com/sigstore/rekor
(types/dsse), https://github.com/sigstore/protobuf-specs.
"""

import base64
import contextlib
import datetime as dt
import hashlib
import json
import struct
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

import loopback

IDENTITY, ISSUER = "person@example.org", "https://accounts.example.org"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
V1_ISSUER, V2_ISSUER = (x509.ObjectIdentifier(f"1.3.6.1.4.1.57264.1.{n}") for n in (1, 8))
TIMESTAMPS = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
DER, SPKI = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
SHA256 = ec.ECDSA(hashes.SHA256())
YEAR = dt.timedelta(days=365)


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def spki(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(DER, SPKI)


def key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(spki(key)).digest()


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def envelope(payload: bytes, key: ec.EllipticCurvePrivateKey, kind: str = PAYLOAD_TYPE) -> dict[str, Any]:
    """A DSSE envelope."""
    data = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
    signatures = [{"sig": b64(key.sign(data, SHA256))}]
    return {"payload": b64(payload), "payloadType": kind, "signatures": signatures}


class Sigstore:
    """One instance of the services; its keys are made anew."""

    def __init__(self) -> None:
        self.authority, self.certificates, self.log = new_key(), new_key(), new_key()
        self.clock: tuple[ec.EllipticCurvePrivateKey, x509.Certificate] | None = None
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test authority")])
        now = dt.datetime.now(dt.UTC)
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        public = self.authority.public_key()
        self.root = (
            x509.CertificateBuilder(name, name, public, x509.random_serial_number())
            .not_valid_before(now - YEAR)
            .not_valid_after(now + YEAR)
            .add_extension(x509.BasicConstraints(ca=True, path_length=1), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
            .sign(self.authority, hashes.SHA256())
        )

    def trusted_root(self) -> dict[str, Any]:
        """What a reader believes."""
        since = {"start": "2020-01-01T00:00:00Z"}
        logs = [
            {
                "baseUrl": "https://log.example.org",
                "hashAlgorithm": "SHA2_256",
                "publicKey": {
                    "rawBytes": b64(spki(key)),
                    "keyDetails": "PKIX_ECDSA_P256_SHA_256",
                    "validFor": since,
                },
                "logId": {"keyId": b64(key_id(key))},
            }
            for key in (self.log, self.certificates)
        ]
        authority = {
            "subject": {"organization": "test", "commonName": "authority"},
            "uri": "https://authority.example.org",
            "certChain": {"certificates": [{"rawBytes": b64(self.root.public_bytes(DER))}]},
            "validFor": since,
        }
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": logs[:1],
            "ctlogs": logs[1:],
            "certificateAuthorities": [authority],
            "timestampAuthorities": [self.clock_authority()] if self.clock else [],
        }

    def clock_authority(self) -> dict[str, Any]:
        """Who signs timestamps (RFC 3161)."""
        assert self.clock is not None
        chain = [{"rawBytes": b64(one.public_bytes(DER))} for one in (self.clock[1], self.root)]
        since = {"start": "2020-01-01T00:00:00Z"}
        return {
            "subject": {"organization": "test", "commonName": "clock"},
            "certChain": {"certificates": chain},
            "validFor": since,
        }

    def with_clock(self) -> Self:
        """Also with an authority for timestamps."""
        key, now = new_key(), dt.datetime.now(dt.UTC)
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "test clock")])
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        own = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key())
        made = (
            x509.CertificateBuilder(self.root.subject, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - YEAR)
            .not_valid_after(now + YEAR)
            .add_extension(usage, critical=True)
            .add_extension(own, critical=True)
            .add_extension(issuer, critical=False)
            .sign(self.authority, hashes.SHA256())
        )
        self.clock = (key, made)
        return self

    def stamped(self, bundle: dict[str, Any], folder: Path) -> dict[str, Any]:
        """The bundle with a timestamp of now, made by openssl, in place of the time of the log."""
        assert self.clock is not None
        pem = serialization.Encoding.PEM
        key = self.clock[0].private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        names = ("serial", "tsa", "signer.pem", "signer.key", "signature", "query", "reply")
        serial, config, signer, secret, signature, query, reply = (folder / name for name in names)
        serial.write_text("01\n")
        config.write_text(
            f"[tsa]\nserial={serial}\ndefault_policy=1.2.3.4\ndigests=sha256\nsigner_digest=sha256\n"
        )
        signer.write_bytes(self.clock[1].public_bytes(pem))
        secret.write_bytes(key)
        signature.write_bytes(base64.b64decode(bundle["dsseEnvelope"]["signatures"][0]["sig"]))
        asked = ("openssl", "ts", "-query", "-data", signature, "-sha256", "-cert", "-out", query)
        subprocess.run(asked, check=True, capture_output=True, timeout=60)
        answer = ("openssl", "ts", "-reply", "-config", config, "-section", "tsa", "-queryfile", query)
        answer += ("-signer", signer, "-inkey", secret, "-out", reply)
        subprocess.run(answer, check=True, capture_output=True, timeout=60)
        changed: dict[str, Any] = json.loads(json.dumps(bundle))
        (entry,) = changed["verificationMaterial"]["tlogEntries"]
        del entry["inclusionPromise"], entry["integratedTime"]
        stamps = [{"signedTimestamp": b64(reply.read_bytes())}]
        changed["verificationMaterial"]["timestampVerificationData"] = {"rfc3161Timestamps": stamps}
        return changed

    def certificate(
        self,
        key: ec.EllipticCurvePublicKey,
        identity: str,
        issuer: str,
        since: dt.datetime,
        *,
        logged: bool = True,
    ) -> x509.Certificate:
        """The certificate of an identity for ten minutes, with the timestamp of the log of certificates."""
        text = issuer.encode()
        name = x509.SubjectAlternativeName([x509.RFC822Name(identity)])
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        builder = (
            x509.CertificateBuilder(self.root.subject, x509.Name([]), key, x509.random_serial_number())
            .not_valid_before(since)
            .not_valid_after(since + dt.timedelta(minutes=10))
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self.authority.public_key()),
                critical=False,
            )
            .add_extension(name, critical=True)
            .add_extension(x509.UnrecognizedExtension(V1_ISSUER, text), critical=False)
            .add_extension(
                x509.UnrecognizedExtension(V2_ISSUER, bytes([0x0C, len(text)]) + text), critical=False
            )
        )
        alone = builder.sign(self.authority, hashes.SHA256())
        if not logged:
            return alone
        stamp = self._stamp(alone.tbs_certificate_bytes, since)
        octets = struct.pack("!HH", len(stamp) + 2, len(stamp)) + stamp
        value = b"\x04" + (bytes([len(octets)]) if len(octets) < 128 else bytes([0x81, len(octets)])) + octets
        return builder.add_extension(x509.UnrecognizedExtension(TIMESTAMPS, value), critical=False).sign(
            self.authority, hashes.SHA256()
        )

    def _stamp(self, certificate: bytes, at: dt.datetime) -> bytes:
        """A SignedCertificateTimestamp (RFC 6962, 3.2) of a certificate that does not have it yet."""
        moment = int(at.timestamp() * 1000)
        entry = key_id(self.authority) + len(certificate).to_bytes(3) + certificate
        signature = self.certificates.sign(struct.pack("!BBQH", 0, 0, moment, 1) + entry + b"\0\0", SHA256)
        begin = struct.pack("!B32sQH", 0, key_id(self.certificates), moment, 0)
        return begin + struct.pack("!BBH", 4, 3, len(signature)) + signature

    def entry(self, signed: dict[str, Any], certificate: x509.Certificate, at: dt.datetime) -> dict[str, Any]:
        """The entry of the log about an envelope, as a bundle has it: the second of two."""
        payload = base64.b64decode(signed["payload"])
        pem = b64(certificate.public_bytes(serialization.Encoding.PEM))
        spec = {
            "envelopeHash": {
                "algorithm": "sha256",
                "value": hashlib.sha256(json.dumps(signed).encode()).hexdigest(),
            },
            "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
            "signatures": [{"signature": one["sig"], "verifier": pem} for one in signed["signatures"]],
        }
        body = json.dumps(
            {"apiVersion": "0.0.1", "kind": "dsse", "spec": spec}, sort_keys=True, separators=(",", ":")
        ).encode()
        other, own = (hashlib.sha256(b"\0" + leaf).digest() for leaf in (b"another entry", body))
        top = hashlib.sha256(b"\x01" + other + own).digest()
        note = f"log.example.org - 1\n2\n{b64(top)}\n"
        name = key_id(self.log)
        line = b64(name[:4] + self.log.sign(note.encode(), SHA256))
        moment = int(at.timestamp())
        promised = {"body": b64(body), "integratedTime": moment, "logID": name.hex(), "logIndex": 1}
        promise = self.log.sign(json.dumps(promised, sort_keys=True, separators=(",", ":")).encode(), SHA256)
        return {
            "logIndex": "1",
            "logId": {"keyId": b64(name)},
            "kindVersion": {"kind": "dsse", "version": "0.0.1"},
            "integratedTime": str(moment),
            "inclusionPromise": {"signedEntryTimestamp": b64(promise)},
            "inclusionProof": {
                "logIndex": "1",
                "rootHash": b64(top),
                "treeSize": "2",
                "hashes": [b64(other)],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.example.org {line}\n"},
            },
            "canonicalizedBody": b64(body),
        }

    def bundle(
        self,
        payload: bytes,
        *,
        identity: str = IDENTITY,
        issuer: str = ISSUER,
        kind: str = PAYLOAD_TYPE,
        since: dt.datetime | None = None,
        later: dt.timedelta = dt.timedelta(minutes=1),
        logged: bool = True,
    ) -> dict[str, Any]:
        """A payload signed by an identity, `later` than the beginning of its certificate."""
        key, since = new_key(), since or dt.datetime.now(dt.UTC) - YEAR / 2
        certificate = self.certificate(key.public_key(), identity, issuer, since, logged=logged)
        signed = envelope(payload, key, kind)
        return {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": b64(certificate.public_bytes(DER))},
                "tlogEntries": [self.entry(signed, certificate, since + later)],
            },
            "dsseEnvelope": signed,
        }

    @contextlib.contextmanager
    def services(self) -> Iterator[dict[str, Any]]:
        """Authority and log for those who sign; their ClientTrustConfig."""

        class Handler(BaseHTTPRequestHandler):
            sigstore = self

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told = self.sigstore.answer(self.path, asked, self.headers["Authorization"] or "")
                self.send_response(201)
                self.end_headers()
                self.wfile.write(json.dumps(told).encode())

        with loopback.serving(Handler) as host:
            service = {"url": f"http://{host}", "majorApiVersion": 1, "operator": "test"}
            service["validFor"] = {"start": "2020-01-01T00:00:00Z"}
            yield {
                "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
                "trustedRoot": self.trusted_root(),
                "signingConfig": {
                    "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
                    "caUrls": [service],
                    "oidcUrls": [service],
                    "rekorTlogUrls": [service],
                    "rekorTlogConfig": {"selector": "ANY"},
                },
            }

    def answer(self, path: str, asked: dict[str, Any], token: str) -> dict[str, Any]:
        """Fulcio's answer about a certificate, or Rekor's about an entry."""
        now = dt.datetime.now(dt.UTC).replace(microsecond=0)
        if path == "/api/v2/signingCert":
            request = x509.load_pem_x509_csr(base64.b64decode(asked["certificateSigningRequest"]))
            claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
            key = request.public_key()
            assert isinstance(key, ec.EllipticCurvePublicKey)
            made = self.certificate(key, claims["sub"], claims["iss"], now)
            chain = [one.public_bytes(serialization.Encoding.PEM).decode() for one in (made, self.root)]
            return {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
        assert path == "/api/v1/log/entries", path
        proposed = asked["spec"]["proposedContent"]
        certificate = x509.load_pem_x509_certificate(base64.b64decode(proposed["verifiers"][0]))
        found = self.entry(json.loads(proposed["envelope"]), certificate, now)
        proof = found["inclusionProof"]
        hexed = lambda text: base64.b64decode(text).hex()  # noqa: E731
        return {
            "1": {
                "body": found["canonicalizedBody"],
                "integratedTime": int(found["integratedTime"]),
                "logID": hexed(found["logId"]["keyId"]),
                "logIndex": 1,
                "verification": {
                    "signedEntryTimestamp": found["inclusionPromise"]["signedEntryTimestamp"],
                    "inclusionProof": {
                        "logIndex": 1,
                        "rootHash": hexed(proof["rootHash"]),
                        "treeSize": 2,
                        "hashes": [hexed(one) for one in proof["hashes"]],
                        "checkpoint": proof["checkpoint"]["envelope"],
                    },
                },
            }
        }


def token(identity: str = IDENTITY, issuer: str = ISSUER) -> str:
    """The token of an identity provider; who signs passes it on, and the authority of a test believes it."""
    now = int(dt.datetime.now(dt.UTC).timestamp())
    claims = {"aud": "sigstore", "sub": identity, "iss": issuer, "iat": now, "exp": now + 600}
    parts = (json.dumps(part).encode() for part in ({"alg": "none", "typ": "JWT"}, claims))
    return ".".join([*(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts), "eA"])
