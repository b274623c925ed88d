"""A package index on disk, with wheels and source archives of a few hundred bytes."""

import base64
import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from stackcheck.recipe import indexes


def add_wheel(index: Path, name: str, version: str, *needs: str) -> str:
    """A wheel in a simple index (PEP 503) on disk; its checksum."""
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {need}\n" for need in needs)
    tags = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {f"{info}/METADATA": metadata, f"{info}/WHEEL": tags}
    record = "".join(f"{path},{_record(text)}\n" for path, text in files.items())
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return _add(index, name, f"{name}-{version}-py3-none-any.whl", body.getvalue())


def _record(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"sha256={digest},{len(text)}"


def add_source(index: Path, name: str, version: str) -> str:
    """A source archive whose set-up cannot run here, as flash-attn's cannot without torch."""
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:gz") as archive:
        for path, text in {
            "PKG-INFO": f"Metadata-Version: 2.1\nName: {name}\n",
            "setup.py": "import torch",
        }.items():
            member = tarfile.TarInfo(f"{name}-{version}/{path}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    return _add(index, name, f"{name.replace('-', '_')}-{version}.tar.gz", body.getvalue())


def _add(index: Path, name: str, file: str, body: bytes) -> str:
    folder = index / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_bytes(body)
    digest = hashlib.sha256(body).hexdigest()
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{file}#sha256={digest}">{file}</a>\n')
    return digest


def use(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "pip_places", lambda **_: [f"--index-url={index.as_uri()}"])


def one_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an index with one torch the only one of this machine's pip."""
    add_wheel(folder, "torch", "2.13.0", "filelock")
    add_wheel(folder, "filelock", "4.0")
    add_wheel(folder, "einops", "0.8.2")
    for tool in ("ninja", "packaging", "psutil", "setuptools", "wheel"):
        add_wheel(folder, tool, "1.0")
    use(folder, monkeypatch)
    return folder
