"""Registries as sites run them: tokens, passwords, a private authority, parts, mounts, mirrors: real ones."""

import base64
import contextlib
import datetime as dt
import functools
import ipaddress
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import requests
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature
from cryptography.x509.oid import NameOID

import asked
import loopback
import registry_process
import small_images
from small_images import STACK_ID, SmallImage, make_image, new_key, quiet
from stackcheck.certificate import publish
from stackcheck.errors import StackcheckError
from stackcheck.oci import upload
from stackcheck.oci.distribution import Repository
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.stores import open_store

KEY = new_key()
NOW = dt.datetime.now(dt.UTC)
release = functools.partial(small_images.release, key=KEY, now=NOW)
USER, PASSWORD = "alice", "wonderland"
HTPASSWD = "alice:$2b$04$AQzr3jdolEJW4dlP3/LBs.U4riFrS5Xb2aItq91qI/LD8sjGGGVtW\n"  # of these two
TOKEN_S = 300


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Authority:
    """A certificate authority of a site, and what it signed for this host's name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self.signed("site authority", self.key.public_key(), authority=True)
        (folder / "ca.crt").write_bytes(self.certificate.public_bytes(serialization.Encoding.PEM))

    def signed(
        self, name: str, public: Any, *, authority: bool = False, address: str | None = None
    ) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        issuer = subject if authority else self.certificate.subject
        names = [x509.DNSName(name)] + ([x509.IPAddress(ipaddress.ip_address(address))] if address else [])
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(NOW - dt.timedelta(days=1))
            .not_valid_after(NOW + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName(names if not authority else [x509.DNSName("ca")]), critical=False
            )
        )
        return made.sign(self.key, hashes.SHA256())

    def server(self, name: str, address: str) -> dict[str, str]:
        """Certificate and key files of a server, as docker-registry's configuration names them."""
        key = ec.generate_private_key(ec.SECP256R1())
        body = self.signed(name, key.public_key(), address=address).public_bytes(serialization.Encoding.PEM)
        (self.folder / "server.crt").write_bytes(body)
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        (self.folder / "server.key").write_bytes(key.private_bytes(*form))
        return {"certificate": str(self.folder / "server.crt"), "key": str(self.folder / "server.key")}


@contextlib.contextmanager
def registry_with(
    folder: Path, name: str = "127.0.0.1", address: str = "127.0.0.1", **sections: Any
) -> Iterator[str]:
    """HOST:PORT of Debian's docker-registry with sections of its configuration."""
    with registry_process.running("docker-registry", folder, address=address, settings=sections) as port:
        yield f"{name}:{port}"


pytestmark = pytest.mark.usefixtures("registry_program")


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch) -> None:
    """No login and no authority of the machine that runs the tests."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "docker").mkdir()


@pytest.fixture
def image(tmp_path) -> SmallImage:
    return make_image(tmp_path / "oci", uuid.uuid4().bytes)


def log_in(folder: Path, host: str, password: str = PASSWORD) -> None:
    auth = base64.b64encode(f"{USER}:{password}".encode()).decode()
    (folder / "docker" / "config.json").write_text(json.dumps({"auths": {host: {"auth": auth}}}))


def log_in_by_helper(folder: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = folder / "bin"
    programs.mkdir()
    helper = programs / "docker-credential-site"
    told = json.dumps({"ServerURL": host, "Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\n[ \"$1\" = get ] && [ \"$(cat)\" = '{host}' ] && echo '{told}'\n")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (folder / "docker" / "config.json").write_text(json.dumps({"credHelpers": {host: "site"}}))


def verified(target: str) -> str:
    now = NOW + dt.timedelta(minutes=1)
    return asked.verified(f"{target}:{STACK_ID}", public_key=KEY.public_key(), now=now).digest


def test_a_password_and_a_private_authority_as_docker_is_told_about_them(tmp_path, image, monkeypatch):
    """Not on a loopback address by its name: so it is asked over TLS."""
    name = socket.gethostname()
    address = socket.gethostbyname(name)
    authority = Authority(tmp_path / "authority")
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    auth = {"htpasswd": {"realm": "site", "path": str(tmp_path / "htpasswd")}}
    tls = authority.server(name, address)
    with registry_with(tmp_path / "r", name, address, auth=auth, http={"tls": tls}) as host:
        target = f"{host}/team/stacks"
        log_in(tmp_path, host)
        with pytest.raises(RegistryError, match="cannot be reached") as caught:
            open_store(target).tags()
        assert "CERTIFICATE_VERIFY_FAILED" in str(caught.value.got) or "verify failed" in str(
            caught.value.got
        )
        trusted = tmp_path / "config" / "docker" / "certs.d" / host
        trusted.mkdir(parents=True)
        (trusted / "ca.crt").write_bytes((authority.folder / "ca.crt").read_bytes())
        log_in(tmp_path, host, "wrong")
        with pytest.raises(RegistryError, match="refused access") as caught:
            release(image, target)
        assert caught.value.next_step == f"docker login {host}"
        assert "wrong" not in str(caught.value)
        log_in(tmp_path, host)
        release(image, target)
        (tmp_path / "docker" / "config.json").unlink()
        with pytest.raises(StackcheckError, match="refused access"):
            verified(target)
        log_in_by_helper(tmp_path, host, monkeypatch)
        assert verified(target) == image.manifest_digest


class TokenServer(BaseHTTPRequestHandler):
    """Gives tokens for what was asked, to whom has the password; anybody may pull."""

    key: Any
    chain: list[str]
    asked: list[str]

    def do_GET(self) -> None:  # the base class's name
        query = parse_qs(urlsplit(self.path).query)
        given = self.headers.get("Authorization", "")
        self.asked.append(f"{query.get('scope', ['?'])[0]} {bool(given)}")
        known = given == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if given and not known:
            self.send_error(401)
            return
        body = json.dumps({"token": self.token(query, known=known)}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def token(self, query: dict[str, list[str]], *, known: bool) -> str:
        access = []
        for scope in query.get("scope", []):
            kind, name, actions = scope.split(":")
            allowed = [action for action in actions.split(",") if known or action == "pull"]
            access.append({"type": kind, "name": name, "actions": allowed})
        now = int(time.time())
        claims = {"iss": "site", "sub": USER, "aud": query["service"][0], "access": access}
        claims |= {"iat": now, "nbf": now - 5, "exp": now + TOKEN_S, "jti": uuid.uuid4().hex}
        header = {"typ": "JWT", "alg": "ES256", "x5c": self.chain}
        text = f"{b64(json.dumps(header).encode())}.{b64(json.dumps(claims).encode())}"
        r, s = decode_dss_signature(self.key.sign(text.encode(), ec.ECDSA(hashes.SHA256())))
        return f"{text}.{b64(r.to_bytes(32) + s.to_bytes(32))}"


@contextlib.contextmanager
def token_server(authority: Authority) -> Iterator[tuple[str, list[str]]]:
    key = ec.generate_private_key(ec.SECP256R1())
    der = authority.signed("tokens", key.public_key()).public_bytes(serialization.Encoding.DER)
    asked: list[str] = []
    chain = [base64.b64encode(der).decode()]
    with loopback.serving(TokenServer, key=key, chain=chain, asked=asked) as host:
        yield f"http://{host}/token", asked


def test_tokens_are_fetched_for_each_scope_and_only_the_token_server_sees_the_password(tmp_path, image):
    authority = Authority(tmp_path / "authority")
    with token_server(authority) as (realm, asked):
        token = {"realm": realm, "service": "registry", "issuer": "site"}
        token["rootcertbundle"] = str(authority.folder / "ca.crt")
        with registry_with(tmp_path / "r", auth={"token": token}) as host:
            target = f"{host}/team/stacks"
            with pytest.raises(StackcheckError, match="refused access"):
                release(image, target)  # nobody logged in, so the token says pull only
            log_in(tmp_path, host)
            release(image, target)
            assert any("pull,push" in scope or "push" in scope for scope in asked)
            (tmp_path / "docker" / "config.json").unlink()
            asked.clear()
            assert verified(target) == image.manifest_digest
            assert asked
            assert not [scope for scope in asked if scope.endswith("True")]
            log_in(tmp_path, host, "wrong")
            with pytest.raises(StackcheckError, match="gave no token"):
                verified(target)


def test_parts_go_to_relative_addresses(tmp_path, monkeypatch):
    """`tests/unit/oci/test_upload.py` breaks parts off."""
    monkeypatch.setattr(upload, "WHOLE_BYTES", 1 << 16)
    monkeypatch.setattr(upload, "PART_BYTES", 1 << 17)
    image = make_image(tmp_path / "oci", os.urandom(1 << 19))
    with registry_with(tmp_path / "r", http={"relativeurls": True}) as host:
        answer = requests.post(f"http://{host}/v2/x/blobs/uploads/", timeout=300)
        assert answer.headers["Location"].startswith("/v2/")
        release(image, f"{host}/whole/parts")
        assert verified(f"{host}/whole/parts") == image.manifest_digest


def test_a_blob_of_another_repository_of_the_registry_is_mounted_and_not_sent(tmp_path, image):
    with registry_with(tmp_path / "r") as host:
        one, two = f"{host}/team/one", f"{host}/team/two"
        release(image, one)
        with pytest.MonkeyPatch.context() as patch:
            written: list[str] = []
            patch.setattr(Repository, "write_blob", lambda _self, blob, _chunks: written.append(blob.digest))
            layer = open_store(one).read_manifest(image.manifest_digest).descriptors("layers")[0].digest
            assert Repository(host, "team/two").mount_blob(layer, open_store(one))
            assert Repository(host, "team/two").has_blob(layer)
            assert not Repository(host, "team/two").mount_blob("sha256:" + "0" * 64, open_store(one))
            assert written == []
        publish.promote(f"{one}:{STACK_ID}", target=two, public_key=KEY.public_key(), report=quiet, now=NOW)
        assert verified(two) == image.manifest_digest


def test_a_mirror_is_read_and_says_clearly_that_it_cannot_be_written(tmp_path, image):
    """A pull-through cache, and a registry in maintenance."""
    with registry_with(tmp_path / "r") as origin:
        release(image, f"{origin}/team/stacks")
        with registry_with(tmp_path / "cache", proxy={"remoteurl": f"http://{origin}"}) as mirror:
            assert verified(f"{mirror}/team/stacks") == image.manifest_digest
            with pytest.raises(StackcheckError) as caught:
                release(make_image(tmp_path / "2", b"second"), f"{mirror}/team/stacks")
            assert caught.value.exit_code == 8
    readonly = {"maintenance": {"readonly": {"enabled": True}}}
    with registry_with(tmp_path / "r", storage=readonly) as host:
        assert verified(f"{host}/team/stacks") == image.manifest_digest
        with pytest.raises(StackcheckError) as caught:
            release(make_image(tmp_path / "3", b"third"), f"{host}/team/stacks")
        assert caught.value.exit_code == 8
        assert "405" in str(caught.value)
