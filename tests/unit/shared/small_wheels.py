"""Wheels of one module, and an index on loopback that offers them and counts what is asked of it."""

import contextlib
import hashlib
import http.server
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import loopback


def make_wheel(
    folder: Path,
    name: str = "small_package",
    *,
    version: str = "1.0",
    tag: str = "py3-none-any",
    word: str = "",
) -> Path:
    """A wheel that pip installs, of one module with one word."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-{tag}.whl"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", f"WORD = {word!r}\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n")
    return path


def locked_line(*wheels: Path) -> str:
    """The line of a lock that takes any of these wheels of one package."""
    name, version = wheels[0].name.split("-")[:2]
    hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels]
    return (
        f"{name.replace('_', '-')}=={version} \\\n"
        + " \\\n".join(f"    --hash=sha256:{h}" for h in hashes)
        + "\n"
    )


@contextlib.contextmanager
def index_of(*wheels: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a simple index (PEP 503), and the files that were fetched from it so far."""
    fetched: list[str] = []
    root = Path(os.path.commonpath([wheel.parent for wheel in wheels]))
    pages: dict[str, list[Path]] = {}
    for wheel in wheels:
        pages.setdefault(wheel.name.split("-")[0].replace("_", "-"), []).append(wheel)
    for name, files in pages.items():
        page = root / "simple" / name / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        links = (f'<a href="/{file.relative_to(root)}">{file.name}</a>' for file in files)
        page.write_text("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>")

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_arguments: object) -> None:
            if self.path.endswith(".whl"):
                fetched.append(self.path)

    with loopback.serving(Handler, root) as host:
        yield f"http://{host}/simple", fetched


def only_index(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Make this host's pip know that one index and nothing else."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", address)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
