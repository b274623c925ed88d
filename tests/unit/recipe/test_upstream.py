"""What registries and release pages tell of bases and wheels, and what is said when they do not answer."""

import functools
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stackcheck.recipe.upstream import OutOfReachError, Upstream, split_reference

DIGEST = "sha256:" + "7" * 64


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("ubuntu:24.04", ("docker.io", "ubuntu", "24.04")),
        ("rocm/dev-ubuntu-24.04:7.2.4-complete", ("docker.io", "rocm/dev-ubuntu-24.04", "7.2.4-complete")),
        ("quay.io/pypa/manylinux_2_28:1", ("quay.io", "pypa/manylinux_2_28", "1")),
        ("127.0.0.1:5000/base:1", ("127.0.0.1:5000", "base", "1")),
        ("localhost/base:1", ("localhost", "base", "1")),
    ],
)
def test_a_base_is_read_as_docker_reads_it(reference: str, expected: tuple[str, str, str]) -> None:
    assert split_reference(reference) == expected


@pytest.fixture
def releases(tmp_path: Path) -> Iterator[str]:
    """A release page in the form of GitHub's API, served on loopback."""
    handler = functools.partial(_Quiet, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "old.whl").write_bytes(b"an old wheel")
        assets = [
            {"name": "new.whl", "digest": DIGEST, "browser_download_url": f"{address}/gone.whl"},
            {"name": "old.whl", "digest": None, "browser_download_url": f"{address}/old.whl"},
        ]
        (tmp_path / "v2.8.3").write_text(json.dumps({"assets": assets}))
        yield address
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


def test_an_official_wheels_checksum_is_the_releases_or_that_of_its_bytes(releases: str) -> None:
    upstream = Upstream(releases=releases)
    assert upstream.wheel_sha256("2.8.3", "new.whl") == "7" * 64
    assert upstream.wheel_sha256("2.8.3", "old.whl") == hashlib.sha256(b"an old wheel").hexdigest()
    with pytest.raises(OutOfReachError, match=r"has no other\.whl"):
        upstream.wheel_sha256("2.8.3", "other.whl")
    with pytest.raises(OutOfReachError, match="404"):
        upstream.wheel_sha256("9.9", "new.whl")
    assert upstream.answers(f"{releases}/old.whl") is None


def test_a_place_that_does_not_answer_is_named_and_asked_once(unused_tcp_port: int) -> None:
    upstream = Upstream(releases=f"http://127.0.0.1:{unused_tcp_port}")
    asked = []
    ask = upstream._json
    upstream._json = lambda url: (asked.append(url), ask(url))[1]
    for _ in range(2):
        with pytest.raises(OutOfReachError, match=f"127.0.0.1:{unused_tcp_port} is out of reach"):
            upstream.wheel_sha256("2.8.3", "new.whl")
    assert len(asked) == 1
    with pytest.raises(OutOfReachError, match="is out of reach"):
        upstream.base_digest(f"127.0.0.1:{unused_tcp_port}/base:1")


@pytest.fixture
def unused_tcp_port() -> int:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Quiet) as server:
        return server.server_port
