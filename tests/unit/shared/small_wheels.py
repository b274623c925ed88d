"""Wheels and source archives of a few bytes, and an index on loopback that counts what is asked of it."""

import base64
import contextlib
import hashlib
import http.server
import io
import os
import tarfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import pytest

import loopback


def wheel(
    folder: Path,
    name: str,
    version: str,
    files: Mapping[str, bytes | str] = MappingProxyType({}),
    *,
    needs: Sequence[str] = (),
    tag: str = "py3-none-any",
    extras: Sequence[str] = (),
) -> Path:
    """A wheel with a RECORD that pip accepts, and metadata of version 2.1."""
    plain = name.replace("-", "_")
    info = f"{plain}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Provides-Extra: {extra}\n" for extra in extras)
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    pure = str(tag.endswith("-any")).lower()
    every = {
        **files,
        f"{info}/METADATA": metadata,
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: stand-in\nRoot-Is-Purelib: {pure}\nTag: {tag}\n",
    }
    bodies = {path: text.encode() if isinstance(text, str) else text for path, text in every.items()}
    record = "".join(f"{path},{_recorded(body)}\n" for path, body in bodies.items())
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / f"{plain}-{version}-{tag}.whl"
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, body in {**bodies, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            archive.writestr(zipfile.ZipInfo(path, (2026, 1, 1, 0, 0, 0)), body)
    return made


def _recorded(body: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(body)}"


def source_archive(folder: Path, name: str, version: str, files: Mapping[str, bytes | str]) -> Path:
    """A source archive: `files` below its folder, with PKG-INFO."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = name.replace("-", "_")
    made = folder / f"{plain}-{version}.tar.gz"
    every = {"PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", **files}
    with tarfile.open(made, "w:gz") as archive:
        for path, text in every.items():
            body = text.encode() if isinstance(text, str) else text
            member = tarfile.TarInfo(f"{plain}-{version}/{path}")
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return made


def make_wheel(
    folder: Path,
    name: str = "small_package",
    *,
    version: str = "1.0",
    tag: str = "py3-none-any",
    word: str = "",
) -> Path:
    """A wheel that pip installs, of one module with one word."""
    return wheel(folder, name, version, {f"{name}.py": f"WORD = {word!r}\n"}, tag=tag)


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
