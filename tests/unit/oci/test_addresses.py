"""Where requests go, and who is told the credentials: whom they are for, once they were asked for."""

import base64
import io
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from unittest import mock

import pytest
import requests

from small_registry import Answer, repository, serving
from stackcheck.errors import ConfigurationError
from stackcheck.oci import credentials
from stackcheck.oci.addresses import is_loopback
from stackcheck.oci.documents import Descriptor, RegistryError, sha256
from stackcheck.oci.transport import Transport


@pytest.mark.parametrize("address", ["http://[::1", "http://x:port/", "http://x:99999/", ""])
def test_a_broken_address_of_a_registry_is_a_clear_error(address):
    blob = Descriptor(media_type="x", digest=sha256(b"a"), size=1)
    with serving(lambda _: (202, {"Location": address}, b"")) as (host, _seen), pytest.raises(RegistryError):
        repository(host).write_blob(blob, lambda: (b"a",))
    challenge = {"WWW-Authenticate": f'Bearer realm="{address}"'}
    with serving(lambda _: (401, challenge, b"")) as (host, _seen), pytest.raises(RegistryError):
        repository(host).tags()
    with (
        serving(lambda _: (200, {"Link": f'<{address or "http://["}>; rel="next"'}, b"{}")) as (host, _seen),
        pytest.raises(RegistryError),
    ):
        repository(host).tags()


def test_a_token_that_would_write_a_header_of_its_own_is_refused():
    def answer(request: BaseHTTPRequestHandler) -> Answer:
        if request.path.startswith("/token"):
            return 200, {}, b'{"token": "x\\r\\nHost: elsewhere"}'
        return 401, {"WWW-Authenticate": f'Bearer realm="http://{request.headers["Host"]}/token"'}, b""

    with serving(answer) as (host, _seen), pytest.raises(RegistryError, match="gave no token"):
        repository(host).tags()


# Some parsers read the host of these before the backslash or the blank, and others after the @.
TWO_HOSTS = [
    "{}://elsewhere.example.org\\@{}/v2/x",
    "{}://elsewhere.example.org @{}/v2/x",
    "{}://elsewhere.example.org\t@{}/v2/x",
    "{}://user@{}/v2/x",
    "{}://{}\\.elsewhere.example.org/v2/x",
]


@pytest.mark.parametrize(
    ("url", "says"),
    [
        *((form.format("https", "registry.example.org"), "invalid address") for form in TWO_HOSTS),
        ("http://registry.example.org/v2/x", "insecure HTTP"),
    ],
)
def test_no_request_goes_to_an_address_that_can_be_read_in_two_ways_or_over_plain_http(url, says):
    transport = Transport("registry.example.org")
    transport._authorization = "Basic c2VjcmV0"
    with (
        mock.patch.object(requests.Session, "request") as sent,
        pytest.raises(RegistryError, match=says),
    ):
        transport.request("PUT", url, expected=(201,))
    sent.assert_not_called()


@pytest.mark.parametrize("realm", [*(form.format("http", "localhost") for form in TWO_HOSTS), "", "/token"])
def test_a_token_is_fetched_from_the_address_that_was_checked(realm):
    challenge = {"WWW-Authenticate": f'Bearer realm="{realm}"'}
    with serving(lambda _: (401, challenge, b"")) as (host, seen):
        with (
            mock.patch.object(requests.Session, "get") as sent,
            pytest.raises(RegistryError, match="invalid address"),
        ):
            repository(host).tags()
        sent.assert_not_called()
        assert len(seen) == 1


def test_a_host_whose_port_is_none_is_a_clear_error():
    with pytest.raises(RegistryError, match="port 99999"):
        repository("localhost:99999").tags()


@pytest.mark.parametrize(
    ("netloc", "own"),
    [
        *(("localhost", True), ("LOCALHOST:5000", True), ("127.0.0.9:1", True), ("[::1]:5000", True)),
        *(("[::1]", True), ("registry.example.org", False), ("localhost.example.org", False)),
        *(("elsewhere\\@localhost", False), ("elsewhere@localhost", False), ("[::2]", False), ("", False)),
    ],
)
def test_this_machine_is_known_by_its_name_and_its_addresses(netloc, *, own):
    assert is_loopback(netloc) == own


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("https://registry.example.org/v2/x", True),
        ("https://registry.example.org:443/v2/x", True),
        ("https://registry.example.org:5000/v2/x", False),
        ("https://elsewhere.example.org/v2/x", False),
    ],
)
def test_credentials_go_to_the_registry_alone(url, *, told):
    transport = Transport("registry.example.org")
    transport._authorization = "Basic c2VjcmV0"
    done = requests.Response()
    done.status_code, done.raw = 201, io.BytesIO()
    with mock.patch.object(requests.Session, "request", return_value=done) as sent:
        transport.request("PUT", url, expected=(201,))
    request = requests.Request("PUT", url, auth=sent.call_args.kwargs["auth"]).prepare()
    assert ("Authorization" in request.headers) == told


def login(folder: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"auth": base64.b64encode(b"user:secret:with:colons").decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def test_basic_credentials_are_sent_only_after_they_were_asked_for(tmp_path, monkeypatch):
    expected = "Basic " + base64.b64encode(b"user:secret:with:colons").decode()
    got: list[str | None] = []

    def ask(request: BaseHTTPRequestHandler) -> Answer:
        got.append(request.headers.get("Authorization"))
        if got[-1] == expected:
            return 200, {}, b'{"tags": ["a"]}'
        return 401, {"WWW-Authenticate": 'Basic realm="x"'}, b""

    with serving(ask) as (host, _seen):
        login(tmp_path, host, monkeypatch)
        assert repository(host).tags() == ("a",)
    assert got == [None, expected]


def test_a_bearer_token_is_fetched_for_the_asked_scope(tmp_path, monkeypatch):
    scope = "repository:a/b:pull"

    def ask(request: BaseHTTPRequestHandler) -> Answer:
        if request.path.startswith("/token"):
            basic = request.headers.get("Authorization", "").startswith("Basic ")
            asked = f"scope={scope.replace(':', '%3A').replace('/', '%2F')}" in request.path
            return (200, {}, b'{"token": "T"}') if basic and asked else (403, {}, b"")
        if request.headers.get("Authorization") == "Bearer T":
            return 200, {}, b'{"tags": ["a"]}'
        realm = f"http://{request.headers['Host']}/token"
        return 401, {"WWW-Authenticate": f'Bearer realm="{realm}",service="s",scope="{scope}"'}, b""

    with serving(ask) as (host, seen):
        login(tmp_path, host, monkeypatch)
        assert repository(host).tags() == ("a",)
        assert len(seen) == 3


def test_credentials_never_go_to_a_token_service_over_plain_http(tmp_path, monkeypatch):
    challenge = {"WWW-Authenticate": 'Bearer realm="http://registry.example.org/token"'}
    with serving(lambda _: (401, challenge, b"")) as (host, _seen):
        login(tmp_path, host, monkeypatch)
        with pytest.raises(RegistryError, match="insecure HTTP"):
            repository(host).tags()


def test_a_refusal_says_how_to_log_in(tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with serving(lambda _: (401, {"WWW-Authenticate": 'Basic realm="x"'}, b"")) as (host, _seen):
        with pytest.raises(RegistryError) as error:
            repository(host).tags()
        assert error.value.next_step == f"docker login {host}"


@pytest.mark.parametrize("content", ["", "[]", '{"auths": {"h": 1}}', '{"auths": {"h": {"auth": "%%"}}}'])
def test_a_broken_docker_configuration_is_a_clear_error(tmp_path, monkeypatch, content):
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(ConfigurationError):
        credentials.find("h")


def test_a_credential_helper_is_asked(tmp_path, monkeypatch):
    helper = tmp_path / "docker-credential-fake"
    helper.write_text('#!/bin/sh\nread host; echo "{\\"Username\\": \\"$host\\", \\"Secret\\": \\"s\\"}"\n')
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credHelpers": {"h": "fake"}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    found = credentials.find("h")
    assert found is not None
    assert (found.username, found.password) == ("h", "s")
    assert "'s'" not in repr(found)


@pytest.mark.parametrize(
    "answer", ["", "[]", "5", '{"Username": "u"}', '{"ServerURL": "h", "Secret": "s3cret"}']
)
def test_a_credential_helper_that_gives_none_is_a_clear_error(tmp_path, monkeypatch, answer):
    helper = tmp_path / "docker-credential-fake"
    helper.write_text(f"#!/bin/sh\necho '{answer}'\n")
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credHelpers": {"h": "fake"}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match="gave no credentials") as caught:
        credentials.find("h")
    assert "s3cret" not in str(caught.value)
