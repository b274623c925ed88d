"""Credentials go to whom they are for, once they were asked for; a broken set-up is a clear error."""

import base64
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from small_registry import Answer, repository, serving
from stackcheck.errors import ConfigurationError
from stackcheck.oci import credentials
from stackcheck.oci.documents import RegistryError


def login(folder: Path, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"auth": base64.b64encode(b"user:secret:with:colons").decode()}
    (folder / "config.json").write_text(json.dumps({"auths": {host: entry}}))
    monkeypatch.setenv("DOCKER_CONFIG", str(folder))


def test_basic_credentials_are_sent_only_after_they_were_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_bearer_token_is_fetched_for_the_asked_scope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_credentials_never_go_to_a_token_service_over_plain_http(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    challenge = {"WWW-Authenticate": 'Bearer realm="http://registry.example.org/token"'}
    with serving(lambda _: (401, challenge, b"")) as (host, _seen):
        login(tmp_path, host, monkeypatch)
        with pytest.raises(RegistryError, match="insecure HTTP"):
            repository(host).tags()


def test_a_refusal_says_how_to_log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with serving(lambda _: (401, {"WWW-Authenticate": 'Basic realm="x"'}, b"")) as (host, _seen):
        with pytest.raises(RegistryError) as error:
            repository(host).tags()
        assert error.value.next_step == f"docker login {host}"


@pytest.mark.parametrize("content", ["", "[]", '{"auths": {"h": 1}}', '{"auths": {"h": {"auth": "%%"}}}'])
def test_a_broken_docker_configuration_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    (tmp_path / "config.json").write_text(content)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(ConfigurationError):
        credentials.find("h")


def test_a_credential_helper_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_a_credential_helper_that_gives_none_is_a_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    helper = tmp_path / "docker-credential-fake"
    helper.write_text(f"#!/bin/sh\necho '{answer}'\n")
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text('{"credHelpers": {"h": "fake"}}')
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ConfigurationError, match="gave no credentials") as caught:
        credentials.find("h")
    assert "s3cret" not in str(caught.value)
