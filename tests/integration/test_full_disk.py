"""A disk that is really full: the place is named, nothing is half-published, and with room it goes on."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripted import LABEL, REFERENCE, let_pass, make_checkout, stackcheck, tags, verify
from stackcheck.engine.client import Engine

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk"),
]

SMALL, LARGE = "8m", "300m"  # the image has 48 MiB that do not compress


class SmallDisk:
    """A folder that is a disk of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SMALL}", "tmpfs", folder], check=True)

    def grow(self) -> None:
        subprocess.run(["mount", "-o", f"remount,size={LARGE}", self.folder], check=True)

    def fill(self) -> None:
        """Take all the room that is left."""
        with (self.folder / "filler").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(self.folder).free)
        assert shutil.disk_usage(self.folder).free == 0

    def free(self) -> None:
        (self.folder / "filler").unlink()

    def litter(self) -> list[Path]:
        return [path for path in self.folder.rglob("*") if ".tmp-" in path.name or "unfinished" in path.name]

    def unmount(self) -> None:
        subprocess.run(["umount", self.folder], check=True)


@pytest.fixture(scope="module")
def passing(tmp_path_factory, scripted_engine: Engine) -> Path:  # noqa: ARG001  # the image has to be there
    """A checkout whose suites pass. Their answer needs the host's facts, which a run writes down first."""
    root = make_checkout(tmp_path_factory.mktemp("passing") / "checkout")
    (root / "tests" / "acceptance" / "answer.json").write_text("{}")
    stackcheck(root, "test", REFERENCE)
    let_pass(root)
    return root


def ended(checkout: Path, *arguments: str, code: int = 0) -> str:
    """What a command printed that ended with this code."""
    found, text = stackcheck(checkout, *arguments)
    assert found == code, text
    return text


@pytest.fixture
def checkout(tmp_path, passing: Path) -> Path:
    return shutil.copytree(passing, tmp_path / "checkout")


def disk(folder: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(folder)
    try:
        yield made
    finally:
        made.unmount()


@pytest.fixture
def dist(checkout: Path) -> Iterator[SmallDisk]:
    yield from disk(checkout / "dist")


@pytest.fixture
def build(checkout: Path) -> Iterator[SmallDisk]:
    shutil.rmtree(checkout / "build")
    yield from disk(checkout / "build")


@pytest.fixture
def elsewhere(tmp_path) -> Iterator[SmallDisk]:
    yield from disk(tmp_path / "elsewhere")


@pytest.mark.slow
def test_a_publication_that_finds_no_room_leaves_no_tag_and_goes_on_when_there_is(checkout, dist):
    ended(checkout, "certify", REFERENCE)
    text = ended(checkout, "publish", REFERENCE, code=10)
    assert str(dist.folder.relative_to(checkout) / "blobs") in text
    assert "No space left on device" in text
    assert "free disk space" in text
    assert (tags(checkout), dist.litter()) == ([], [])
    dist.grow()
    ended(checkout, "publish", REFERENCE)
    assert verify(checkout) == 0
    assert LABEL in tags(checkout)


@pytest.mark.slow
def test_a_full_disk_keeps_the_tag_on_what_was_certified_before(checkout, dist):
    dist.grow()
    ended(checkout, "certify", REFERENCE)
    ended(checkout, "publish", REFERENCE)
    before = (dist.folder / "index.json").read_bytes()
    ended(checkout, "certify", REFERENCE, "--force")
    dist.fill()
    ended(checkout, "publish", REFERENCE, code=10)
    assert (dist.folder / "index.json").read_bytes() == before
    assert verify(checkout) == 0
    dist.free()
    ended(checkout, "publish", REFERENCE)
    assert verify(checkout) == 0


@pytest.mark.slow
def test_an_image_that_finds_no_room_in_build_is_no_traceback(checkout, build):
    text = ended(checkout, "certify", REFERENCE, code=10)
    assert str(build.folder) in text
    assert "No space left on device" in text
    assert build.litter() == []
    build.grow()
    ended(checkout, "certify", REFERENCE)


@pytest.mark.slow
def test_a_certificate_that_finds_no_room_is_not_half_there(checkout, build):
    build.grow()
    ended(checkout, "test", REFERENCE)
    build.fill()
    text = ended(checkout, "certify", REFERENCE, code=10)
    assert str(build.folder) in text
    assert list(build.folder.rglob("statements/*")) == []
    ended(checkout, "publish", REFERENCE, code=2)
    assert tags(checkout) == []
    build.free()
    ended(checkout, "certify", REFERENCE)
    ended(checkout, "publish", REFERENCE)
    assert verify(checkout) == 0


def test_an_export_that_finds_no_room_leaves_nothing(checkout, elsewhere):
    tar = elsewhere.folder / "image.tar"
    text = ended(checkout, "export", REFERENCE, "--output", str(tar), code=10)
    assert str(tar) in text
    assert "No space left on device" in text
    assert list(elsewhere.folder.iterdir()) == []
    elsewhere.grow()
    ended(checkout, "export", REFERENCE, "--output", str(tar))
    assert tar.stat().st_size > 48 << 20


@pytest.mark.slow
def test_a_pull_that_finds_no_room_is_no_refused_certificate(
    checkout, elsewhere, scripted_engine, monkeypatch
):
    ended(checkout, "certify", REFERENCE)
    ended(checkout, "publish", REFERENCE)
    monkeypatch.setenv("TMPDIR", str(elsewhere.folder))
    pull = ("pull", f"oci:dist:{LABEL}", "--device-model", "CPU", "--driver", "none")
    text = ended(checkout, *pull, code=10)
    assert str(elsewhere.folder) in text
    assert "TMPDIR" in text
    assert list(elsewhere.folder.iterdir()) == []
    elsewhere.grow()
    text = ended(checkout, *pull)
    (name,) = (line.split()[1] for line in text.splitlines() if line.startswith("image"))
    scripted_engine.remove(name)


def test_a_checkout_on_a_read_only_disk_is_named_and_stays(tmp_path):
    root = make_checkout(tmp_path / "checkout")
    shutil.move(root / "images", tmp_path / "images")
    made = SmallDisk(root / "images")
    try:
        shutil.copytree(tmp_path / "images", made.folder, dirs_exist_ok=True)
        dockerfile = next(made.folder.glob("cpu-*/Dockerfile"))
        dockerfile.write_text("FROM scratch\n")
        subprocess.run(["mount", "-o", "remount,ro", made.folder], check=True)
        text = ended(root, "render", "cpu-*", code=10)
        assert str(dockerfile.relative_to(root)) in text
        assert "Read-only file system" in text
        assert (dockerfile.read_text(), made.litter()) == ("FROM scratch\n", [])
    finally:
        made.unmount()
