"""Locks from pages of links: AMD's wheels are on one."""

import functools
import hashlib
import http.server
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from small_wheels import index_of, locked_line, make_wheel, only_index
from stackcheck.engine import apt
from stackcheck.errors import BuildError
from stackcheck.files import requirements
from stackcheck.imaging import base_sources, bootstrap, platforms
from stackcheck.imaging.wheels import wheel_cache
from stackcheck.recipe import indexes
from stackcheck.recipe.lock import WheelFolder

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


SECRET = "s3cretPW"


def test_no_password_of_an_address_is_an_argument_of_a_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way to ask an index, with an address of pip's settings and one of the site's mirrors."""
    argv: list[str] = []
    run = subprocess.run

    def seen(command: list[str], **options: Any) -> Any:
        argv.append(" ".join(command))
        return run(command, **options)

    wheel = make_wheel(tmp_path / "index")
    with index_of(wheel) as (address, fetched):
        own = address.replace("://", f"://robot:{SECRET}@")
        only_index(monkeypatch, own)
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setattr(subprocess, "run", seen)
        name, version = "small-package", "1.0"
        places = [*indexes.pip_places(find_links=True), f"--find-links={own}"]
        assert f"{name}=={version}" in indexes.resolve([name], python="3.11", places=places)
        assert indexes.listed([f"{name}=={version}"], python="3.11", places=places)
        also = (f"--extra-index-url={own}",)
        assert indexes.versions(name, python="3.11", also=also) == (version,)
        target = platforms.InstallTarget(platform="linux/amd64", python="3.11", glibc=36)
        wanted = requirements.read_packages(locked_line(wheel))
        assert wheel_cache.WheelCache(tmp_path / "wheels").fill(wanted, target, also) == {}
        assert fetched
    monkeypatch.setattr(apt, "options", lambda: (f'Acquire::http::Proxy "http://robot:{SECRET}@proxy:1";',))
    way = base_sources.Way(name="here", sources=f"deb http://robot:{SECRET}@archive/ bookworm main")
    argv.append(" ".join(bootstrap._command("bookworm", (), bootstrap.NOTHING_SELECTED, tmp_path / "x", way)))
    assert len(argv) > 5
    assert [line for line in argv if SECRET in line] == []


# A lock of one folder of wheels: the folder's own hashes, or a refusal that names what is absent.


def test_a_lock_has_the_hashes_of_the_files_and_what_is_absent_is_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "house", word="one")
    house = WheelFolder(wheel.parent)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = house.resolve(["small-package==1.0"], python="3.12")
    assert text == f"small-package==1.0 \\\n    --hash=sha256:{digest}\n"
    assert house.files(["small-package==1.0"]) == {"small-package==1.0": {wheel.name: digest}}
    with pytest.raises(BuildError, match="lacks packages of the stack") as caught:
        house.resolve(["small-package==1.0", "absent-one==2"], python="3.12")
    assert "absent-one" in str(caught.value.got)
    assert str(wheel.parent) in str(caught.value.next_step)
