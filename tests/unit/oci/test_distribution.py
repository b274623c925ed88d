"""A registry that fails, hangs, lies or asks who we are: a clear answer every time, and nothing tagged."""

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from urllib3.connection import HTTPConnection

from small_images import STACK_ID, certify, copy_to, make_image, new_key, quiet
from small_registry import Answer, repository, reset, serving
from stackcheck.oci.distribution import Repository
from stackcheck.oci.documents import MANIFEST_LIMIT_BYTES, IntegrityError, Manifest, RegistryError, sha256


def test_a_registry_that_fails_is_asked_three_times_and_then_named():
    with serving(lambda _: (500, {}, b"out of disk")) as (host, seen):
        with pytest.raises(RegistryError) as error:
            repository(host).read_manifest("x")
        assert len(seen) == 3
    assert error.value.exit_code == 8
    assert "500" in str(error.value)
    assert "out of disk" in str(error.value)


def test_a_read_whose_connection_is_reset_is_asked_again():
    resets = iter([True, False])

    def answer(handler: BaseHTTPRequestHandler) -> Answer:
        if next(resets):
            reset(handler)
        return 200, {}, b"{}"

    with serving(answer) as (host, seen):
        assert repository(host).read_manifest("x").body == b"{}"
        assert seen == ["GET /v2/a/b/manifests/x"] * 2


def test_a_registry_that_resets_every_connection_is_asked_three_times_and_then_named():
    with serving(reset) as (host, seen):  # type: ignore[arg-type]  # it never answers
        with pytest.raises(RegistryError, match="cannot be reached") as error:
            repository(host).has_blob(sha256(b""))
        assert len(seen) == 3
    assert "ConnectionResetError" in (error.value.got or "")


def test_a_write_whose_connection_is_reset_is_not_sent_again():
    manifest = Manifest(media_type="application/vnd.oci.image.manifest.v1+json", body=b"{}")
    with serving(reset) as (host, seen):  # type: ignore[arg-type]  # it never answers
        with pytest.raises(RegistryError, match="cannot be reached"):
            repository(host).write_manifest(manifest, "x")
        assert len(seen) == 1


def test_a_registry_that_hangs_is_given_up_after_the_time_out(monkeypatch):
    waited: list[object] = []

    def hang(connection: HTTPConnection) -> None:
        waited.append(connection.timeout)
        raise TimeoutError

    monkeypatch.setattr(HTTPConnection, "getresponse", hang)
    with (
        serving(lambda _: (200, {}, b"")) as (host, _seen),
        pytest.raises(RegistryError, match="does not answer"),
    ):
        repository(host, timeout_s=(20.0, 40.0)).read_manifest("x")
    assert set(waited) == {40.0}


def test_a_registry_that_hangs_in_the_middle_of_a_blob_is_given_up():
    with (
        serving(lambda _: (200, {"Content-Length": "100"}, b"half")) as (host, _seen),
        pytest.raises(RegistryError),
    ):
        list(repository(host).read_blob(sha256(b"whole")))


@pytest.mark.parametrize(("failures", "stored"), [(2, True), (3, False)])
def test_a_blob_that_is_unknown_for_a_moment_is_asked_for_again(failures, stored):
    """As docker-registry answers when two publishers upload the same layer at once."""
    body = b'{"errors":[{"code":"MANIFEST_BLOB_UNKNOWN","message":"blob unknown to registry"}]}'
    answers = iter([(400, {}, body)] * failures + [(201, {}, b"")])
    manifest = Manifest(media_type="x", body=b"{}")
    with serving(lambda _: next(answers)) as (host, seen):
        if stored:
            repository(host).write_manifest(manifest, "x")
        else:
            with pytest.raises(RegistryError, match="the registry failed"):
                repository(host).write_manifest(manifest, "x")
        assert len(seen) == 3


@pytest.mark.parametrize("kind", ["blob", "manifest"])
def test_wrong_bytes_are_refused(kind):
    digest = sha256(b"right")
    with serving(lambda _: (200, {"Content-Type": "x"}, b"wrong")) as (host, _seen):
        found = repository(host)
        with pytest.raises(IntegrityError):
            list(found.read_blob(digest)) if kind == "blob" else found.read_manifest(digest)


def test_a_tag_whose_stated_digest_is_not_its_own_is_refused():
    headers = {"Docker-Content-Digest": sha256(b"other")}
    with serving(lambda _: (200, headers, b"{}")) as (host, _seen), pytest.raises(IntegrityError):
        repository(host).read_manifest("x")


@pytest.mark.parametrize(
    ("what", "body"),
    [
        *(("referrers", body) for body in (b"", b"<html>", b"[]", b'{"manifests": "x"}')),
        ("referrers", b'{"manifests": [{"digest": 1}]}'),
        *(("tags", body) for body in (b'{"tags": 5}', b'{"tags": {"a": 1}}', b"[" * 100_000)),
    ],
)
def test_nonsense_is_a_clear_error(what, body):
    with serving(lambda _: (200, {"Content-Type": "x"}, body)) as (host, _seen), pytest.raises(RegistryError):
        repository(host).tags() if what == "tags" else repository(host).referrers(sha256(b"x"))


def test_a_manifest_without_end_is_cut_off():
    with (
        serving(lambda _: (200, {"Content-Type": "x"}, b"x" * (5 * 2**20))) as (host, _seen),
        pytest.raises(RegistryError, match="too long"),
    ):
        repository(host).read_manifest("x")


def test_a_registry_that_lists_no_tags_is_not_one_without_tags():
    with serving(lambda _: (405, {}, b"")) as (host, _seen):
        with pytest.raises(RegistryError, match="405"):
            repository(host).tags()
        assert repository(host).referrers(sha256(b"x")) is None


@pytest.mark.parametrize("status", [404, 405])
@pytest.mark.parametrize("what", ["tags", "referrers"])
def test_a_list_whose_next_page_is_missing_is_no_list(what, status):
    def pages(request: BaseHTTPRequestHandler) -> Answer:
        if "last=" in request.path:
            return status, {}, b""
        body = b'{"tags": ["a"], "manifests": []}'
        return 200, {"Link": f'</v2/a/b/{what}/list?last=a>; rel="next"'}, body

    with serving(pages) as (host, _seen), pytest.raises(RegistryError, match=str(status)):
        repository(host).tags() if what == "tags" else repository(host).referrers(sha256(b"x"))


def test_another_machine_is_spoken_to_over_https_unless_asked():
    assert Repository("registry.example.org", "a")._root == "https://registry.example.org/v2/a"
    assert Repository("registry.example.org", "a", plain_http=True)._root.startswith("http://")
    assert Repository("localhost:5000", "a")._root == "http://localhost:5000/v2/a"
    assert Repository("docker.io", "a")._root == "https://registry-1.docker.io/v2/library/a"


class Memory:
    """A registry that keeps what it is given, and fails from the n-th request on."""

    def __init__(self, fails_at: int, status: int = 500) -> None:
        self.left = fails_at
        self.status = status
        self.kept: dict[str, bytes] = {}
        self.tagged: list[str] = []
        self.requests = self.tagged_at = 0

    def __call__(self, request: Any) -> Answer:
        self.left -= 1
        self.requests += 1
        if self.left < 0:
            return self.status, {}, b"planted"
        if request.command in {"GET", "HEAD"}:
            return self.give(request.path)
        if request.command == "POST":
            return 202, {"Location": "/upload"}, b""  # relative, as some registries answer
        self.take(request)
        return 201, {}, b""

    def take(self, request: Any) -> None:
        path, _, query = request.path.partition("?digest=")
        if path == "/upload":
            self.kept[f"/v2/a/b/blobs/{query}"] = request.body
        else:
            self.kept[path] = self.kept[f"/v2/a/b/manifests/{sha256(request.body)}"] = request.body
            self.tagged.append(path.rpartition("/")[2])
            self.tagged_at = self.requests

    def give(self, path: str) -> Answer:
        if path == "/v2/a/b/tags/list":
            return 200, {}, json.dumps({"tags": self.tagged}).encode()
        if path not in self.kept:
            return 404, {}, b""
        kind = "index" if b'"manifests"' in self.kept[path] else "manifest"
        return 200, {"Content-Type": f"application/vnd.oci.image.{kind}.v1+json"}, self.kept[path]


def publish_into(memory: Memory, folder: Path) -> None:
    key, image = new_key(), make_image(folder)
    with serving(memory) as (host, _seen):
        copy_to(repository(host, retry_delays_s=()), image, certify(image, key), key)


@pytest.mark.slow
def test_a_registry_that_fails_at_any_request_up_to_the_tag_gets_no_tag(tmp_path):
    whole = Memory(10_000)
    publish_into(whole, tmp_path / "whole")
    assert whole.tagged[-1] == STACK_ID
    requests = 10_000 - whole.left
    assert whole.tagged_at > 40
    for n in range(requests):
        memory = Memory(n)
        with pytest.raises(RegistryError):
            publish_into(memory, tmp_path / str(n))
        assert STACK_ID not in memory.tagged or n >= whole.tagged_at  # the last look failed, after the tag


@pytest.mark.parametrize("what", ["tags", "referrers"])
def test_a_list_that_leads_back_to_a_page_of_its_own_is_refused(what):
    headers = {"Link": f'</v2/a/b/{what}/list?n=1>; rel="next"'}
    body = b'{"tags": ["a"], "manifests": []}'
    with (
        serving(lambda _: (200, headers, body)) as (host, seen),
        pytest.raises(RegistryError, match="never ends"),
    ):
        repository(host).tags() if what == "tags" else repository(host).referrers(sha256(b"x"))
    assert len(seen) == 2


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_end_takes_neither_time_nor_memory(status):
    taken = 0

    def endless() -> Iterator[bytes]:
        nonlocal taken
        while taken < 32 * MANIFEST_LIMIT_BYTES:  # so that this test ends where there is no limit
            taken += 2**20
            yield b" " * 2**20

    words = {200: "too long", 400: "the registry failed"}
    with (
        serving(lambda _: (status, {}, endless())) as (host, _seen),
        pytest.raises(RegistryError, match=words[status]) as caught,
    ):
        repository(host).tags()
    assert len(str(caught.value)) < 1000
    assert taken < 8 * MANIFEST_LIMIT_BYTES  # what the sockets of both ends hold is among it


def test_a_registry_that_asks_for_another_login_is_quoted():
    headers = {"WWW-Authenticate": "Negotiate"}
    with (
        serving(lambda _: (401, headers, b"log in by kerberos")) as (host, _seen),
        pytest.raises(RegistryError, match="log in by kerberos"),
    ):
        repository(host).tags()


def test_a_login_and_a_cron_job_take_the_same_lock(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    for runtime in (str(tmp_path / "run"), ""):
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        with Repository("localhost:1", "a").writing(quiet):
            pass
    assert len([*tmp_path.rglob("*.lock")]) == 1


def test_a_lock_that_cannot_be_made_names_a_way_that_helps(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/nowhere")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    with pytest.raises(RegistryError, match="XDG_STATE_HOME="), Repository("localhost:1", "a").writing(quiet):
        pass
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Repository("localhost:1", "a").writing(quiet):
        pass


def test_a_lock_that_somebody_laid_in_the_way_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with Repository("localhost:1", "a").writing(quiet):
        (lock,) = (tmp_path / "stackcheck").glob("*.lock")
    lock.unlink()
    lock.symlink_to("/etc/hostname")
    with pytest.raises(RegistryError, match="lock"), Repository("localhost:1", "a").writing(quiet):
        pass
