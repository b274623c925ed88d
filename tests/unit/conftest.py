"""Fixtures that several unit tests share. Nothing here is autouse: a module names what all of its tests need
(`pytestmark = pytest.mark.usefixtures(...)`).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import settings

import small_checkout as checkouts
import small_index
import suites_answers
from small_checkout import FakeEngine
from small_dist import release
from small_flow import Job
from small_images import SmallImage, make_image
from small_stacks import ROOT
from small_target import Publisher
from stackcheck.suite import inputs
from stackcheck.suite.results import ReportedInputs

# A run is red for what was changed, and not for a rare draw; STACKCHECK_DRAWS=anew looks for those, as
# .github/workflows/draws.yml does each night. No deadline: 200 ms would measure the machine.
settings.register_profile("same", deadline=None, derandomize=True)
settings.register_profile("anew", deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("STACKCHECK_DRAWS", "same"))


@pytest.fixture
def no_disk_flushes(monkeypatch) -> None:
    """For tests that write hundreds of layouts: none of them cuts the power."""
    monkeypatch.setattr("stackcheck.files.atomic.os.fsync", lambda _file: None)


@pytest.fixture(scope="module")
def frozen_once(tmp_path_factory) -> Iterator[None]:
    """The 530 files are frozen once, and every plan has a link to them: `test_inputs.py` has the copying."""
    folder = tmp_path_factory.mktemp("frozen") / "suite"
    digests = inputs.freeze(ROOT, folder)

    def link(root: Path, target: Path) -> ReportedInputs:
        assert root == ROOT
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder)
        return digests

    with mock.patch.object(inputs, "freeze", link):
        yield


@pytest.fixture(scope="module")
def suites_asked_here() -> Iterator[None]:
    """Questions to this checkout's suites start no program: `test_first_amd_host.py` has the real one."""
    with suites_answers.asked_here():
        yield


@pytest.fixture
def small_checkout(tmp_path, monkeypatch) -> Path:
    """A checkout whose images are a few kilobytes, on a host without a GPU."""
    return checkouts.make_checkout(tmp_path, monkeypatch)


@pytest.fixture
def own_home(tmp_path, monkeypatch, small_checkout: Path) -> None:
    """The user's key and the current folder are the test's own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(small_checkout)


@pytest.fixture
def fake_engine(monkeypatch) -> FakeEngine:
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
def publisher(tmp_path) -> Publisher:
    """A key and a target on disk that it signs for."""
    return Publisher(tmp_path)


@pytest.fixture
def image(tmp_path) -> SmallImage:
    """An image of a few kilobytes."""
    return make_image(tmp_path / "oci")


@pytest.fixture
def dist(tmp_path, image: SmallImage) -> Path:
    """A layout on disk with that image, published."""
    release(image, tmp_path / "dist")
    return tmp_path / "dist"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """A package index on disk, the only one of this machine's pip."""
    return small_index.one_torch(tmp_path / "simple", monkeypatch)
