"""Locks from pages of links: AMD's wheels are on one."""

from __future__ import annotations

import functools
import hashlib
import http.server
import subprocess
import threading
import zipfile
from typing import TYPE_CHECKING

from stackcheck.recipe import indexes

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

WHEEL = "torch-2.9.1+rocm7.2.4.lw.git39497456-cp312-cp312-linux_x86_64.whl"
METADATA = "Metadata-Version: 2.1\nName: torch\nVersion: 2.9.1+rocm7.2.4.lw.git39497456\n"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_arguments: object) -> None:
        """Keep quiet."""


def test_a_wheel_of_a_page_without_hashes_is_locked_by_its_hash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    page = tmp_path / "page"
    page.mkdir()
    info = "torch-2.9.1+rocm7.2.4.lw.git39497456.dist-info"
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr(f"{info}/METADATA", METADATA)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: cp312-cp312-linux_x86_64\n")
        wheel.writestr(f"{info}/RECORD", "")
    handler = functools.partial(_Quiet, directory=str(page))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        places = ["--no-index", f"--find-links=http://127.0.0.1:{server.server_port}/"]
        text = indexes.resolve(["torch==2.9.1"], python="3.12", places=places)
        server.shutdown()
    digest = hashlib.sha256((page / WHEEL).read_bytes()).hexdigest()
    assert text == f"{WHEEL.split('-cp', maxsplit=1)[0].replace('-', '==')} \\\n    --hash=sha256:{digest}\n"


def test_pip_is_asked_for_its_places_once_and_again_after_a_change_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[object] = []
    run = subprocess.run

    def counted(command: list[str], **options: object) -> object:
        started.append(command)
        return run(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", counted)
    for address in ("http://127.0.0.1:1/first/", "http://127.0.0.1:1/second/"):
        monkeypatch.setenv("PIP_INDEX_URL", address)
        for find_links in (True, False, True):
            assert f"--index-url={address}" in indexes.pip_places(find_links=find_links)
    assert len(started) == 2
