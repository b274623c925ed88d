"""A site's mirror of all that ROCm stacks are made from, on this machine: indexes, archives, a registry.

In: stacks, an address that containers reach, a registry. Out: a tree that a web server of this module serves
(PEP 503 pages, signed apt archives), bases in the registry, and a `mirrors.yaml` that leads there. The two
package indexes ask for a login, as a site's do.
"""

import base64
import contextlib
import http.server
import io
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import rocm_archives
import rocm_wheels
import small_wheels
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import rocm

USER, PASSWORD = "reader", "not-to-be-found-anywhere-Zq7"
GUARDED = ("/pypi", "/pytorch")
# Of the host's own index: what really builds a wheel from a source archive.
REAL = ("setuptools", "wheel", "packaging")
PLAIN = {
    "filelock": "3.20.0", "einops": "0.8.2", "ninja": "1.13.0", "typing-extensions": "4.15.0",
    "pluggy": "1.6.0",
}  # fmt: skip


class Mirror:
    """The tree, and what leads to it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.tree = folder / "tree"
        self.scratch = folder / "scratch"
        self.file = folder / "mirrors.yaml"
        self.key = folder / "rocm.gpg"
        self.netrc = folder / "netrc"
        self.home = folder / "gnupg"
        self.address = address
        self.asked: list[str] = []
        self.scratch.mkdir(parents=True)

    def environment(self, cache: Path) -> dict[str, str]:
        """What a user of the site has set for pip, uv and this tool; logins are the clients' own."""
        host = self.address.partition("://")[2]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        return {
            **kept,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://{USER}:{PASSWORD}@{host}/pypi/",
            "PIP_TRUSTED_HOST": host.partition(":")[0],
            "NETRC": str(self.netrc),
            "UV_CACHE_DIR": str(self.scratch / "uv"),
            "PIP_CACHE_DIR": str(self.scratch / "pip"),
            "STACKCHECK_MIRRORS": str(self.file),
            "STACKCHECK_WHEEL_CACHE": str(cache),
        }

    def write_configuration(self, registry: str) -> None:
        apt = "".join(
            f"  {name}: ['deb [trusted=yes] {self.address}/ubuntu {suite} main']\n"
            for name, suite in rocm_archives.SUITES.items()
        )
        self.file.write_text(
            "schema: 1\nurls:\n"
            f"  https://download.pytorch.org/whl: {self.address}/pytorch/whl\n"
            f"  https://repo.radeon.com: {self.address}/amd\n"
            f"registries:\n  docker.io: {registry}/hub\napt:\n{apt}"
            f"keys:\n  https://repo.radeon.com: {self.key.name}\n"
        )
        host = self.address.partition("://")[2].partition(":")[0]
        self.netrc.write_text(f"machine {host} login {USER} password {PASSWORD}\n")
        self.netrc.chmod(0o600)


def fill(mirror: Mirror, stacks: Sequence[Stack]) -> None:
    """Everything that the stacks ask for, as a site would have copied it."""
    for name in REAL:
        _download_real(mirror, name)
    for name, version in PLAIN.items():
        _plain(mirror, name, version)
    for stack in stacks:
        for name, version in (pin.split("==") for pin in stack.requirements[1:]):
            _plain(mirror, name, version)
        rocm_wheels.torch(mirror, stack)
    rocm_wheels.flash_attn(mirror, stacks)
    rocm_archives.make_key(mirror)
    for version in sorted({stack.runtime_version or "" for stack in stacks if rocm.takes_smi(stack)}):
        rocm_archives.amd_archive(
            mirror, version, [stack for stack in stacks if stack.runtime_version == version]
        )
    # gpg started an agent for its home.
    subprocess.run(["gpgconf", "--homedir", str(mirror.home), "--kill", "all"], check=True, timeout=300)
    for system in sorted({stack.os for stack in stacks}):
        rocm_archives.ubuntu_archive(mirror, system, [stack for stack in stacks if stack.os == system])


def _plain(mirror: Mirror, name: str, version: str) -> None:
    """A package of one module; pytest asks for the metadata of pluggy, so its stand-in requires it."""
    module = name.replace("-", "_")
    files = {f"{module}/__init__.py": f"__version__ = {version!r}\n"}
    needs = ("pluggy",) if name == "pytest" else ()
    small_wheels.wheel(mirror.tree / "pypi" / name, name, version, files, needs=needs)


def _download_real(mirror: Mirror, name: str) -> None:
    folder = mirror.tree / "pypi" / name
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), name], check=True, timeout=300)


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files, folders as pages of links with hashes, and a login for the indexes."""

    def __init__(self, *arguments: Any, mirror: Mirror, **options: Any) -> None:
        self.mirror = mirror
        super().__init__(*arguments, directory=str(mirror.tree), **options)

    def log_message(self, *_arguments: object) -> None:
        """Keep quiet."""

    def send_head(self) -> Any:
        self.mirror.asked.append(self.path)
        login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.path.startswith(GUARDED) and self.headers.get("Authorization") != login:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="mirror"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> Any:
        links = "".join(
            _link(Path(path) / name) for name in sorted(entry.name for entry in Path(path).iterdir())
        )
        body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


class _Server(http.server.ThreadingHTTPServer):
    """uv connects fifty times at once: with the library's queue of five it waits a second each time."""

    request_queue_size = 128


def _link(path: Path) -> str:
    name = unquote(path.name).replace("+", "%2B")
    if path.is_dir():
        return f'<a href="{name}/">{path.name}</a>\n'
    # The indexes of ROCm's packages state no hashes.
    digest = "" if path.name.startswith("rocm") else f"#sha256={rocm_archives.digest(path)}"
    return f'<a href="{name}{digest}">{path.name}</a>\n'


@contextlib.contextmanager
def served(folder: Path, host: str) -> Iterator[Mirror]:
    """An empty mirror at an address of this machine that containers reach."""
    server = _Server((host, 0), http.server.BaseHTTPRequestHandler)
    mirror = Mirror(folder, f"http://{host}:{server.server_address[1]}")
    server.RequestHandlerClass = partial(_Handler, mirror=mirror)  # type: ignore[assignment]
    mirror.tree.mkdir()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=300)
