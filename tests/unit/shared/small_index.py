"""A package index on disk, with wheels and source archives of a few hundred bytes."""

import hashlib
from pathlib import Path

import pytest

import small_wheels
from stackcheck.recipe import indexes


def add_wheel(index: Path, name: str, version: str, *needs: str) -> str:
    """A wheel in a simple index (PEP 503) on disk; its checksum."""
    return _listed(small_wheels.wheel(index / name, name, version, needs=needs))


def add_source(index: Path, name: str, version: str) -> str:
    """A source archive whose set-up cannot run here, as flash-attn's cannot without torch."""
    return _listed(small_wheels.source_archive(index / name, name, version, {"setup.py": "import torch"}))


def _listed(file: Path) -> str:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with file.with_name("index.html").open("a") as page:
        page.write(f'<a href="{file.name}#sha256={digest}">{file.name}</a>\n')
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
