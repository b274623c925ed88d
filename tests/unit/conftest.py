"""Fixtures that several unit tests share. Nothing here is autouse: a module names what all of its tests need
(`pytestmark = pytest.mark.usefixtures(...)`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import small_checkout as checkouts
import small_index
from small_checkout import FakeEngine
from small_dist import release
from small_flow import Job
from small_images import SmallImage, make_image
from small_target import Publisher

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def no_disk_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that write hundreds of layouts: none of them cuts the power."""
    monkeypatch.setattr("stackcheck.files.atomic.os.fsync", lambda _file: None)


@pytest.fixture
def small_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose images are a few kilobytes, on a host without a GPU."""
    return checkouts.make_checkout(tmp_path, monkeypatch)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_checkout: Path) -> None:
    """The user's key and the current folder are the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(small_checkout)


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """The engine that every verb finds."""
    from stackcheck.cli import build

    fake = FakeEngine()
    monkeypatch.setattr(build, "connected", lambda _report, **_options: fake)
    return fake


@pytest.fixture
def job(small_checkout: Path, fake_engine: FakeEngine) -> Job:
    """The main job in that checkout, on that engine."""
    return Job(small_checkout, fake_engine)


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    """A key and a target on disk that it signs for."""
    return Publisher(tmp_path)


@pytest.fixture
def image(tmp_path: Path) -> SmallImage:
    """An image of a few kilobytes."""
    return make_image(tmp_path / "oci")


@pytest.fixture
def dist(tmp_path: Path, image: SmallImage) -> Path:
    """A layout on disk with that image, published."""
    release(image, tmp_path / "dist")
    return tmp_path / "dist"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package index on disk, the only one of this machine's pip."""
    return small_index.one_torch(tmp_path / "simple", monkeypatch)
