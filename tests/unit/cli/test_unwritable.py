"""An output that cannot be written is exit 10 with its path: no traceback, and no half-written file."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

import speed_results
from small_checkout import CPU_STACK, call
from stackcheck.errors import FileError
from stackcheck.files.atomic import TEMPORARY
from stackcheck.imaging.wheels.wheel_cache import WheelCache

pytestmark = pytest.mark.usefixtures("own_home")

DOCKERFILE = f"images/{CPU_STACK}/Dockerfile"
LOCK = f"images/{CPU_STACK}/requirements.lock"
LOCKED = f"torch==2.13.0 \\\n    --hash=sha256:{'0' * 64}\n"


def refuse(number: int) -> Callable[[object], None]:
    """What the operating system says when the bytes have to reach the disk."""

    def fsync(_file: object) -> None:
        raise OSError(number, os.strerror(number))

    return fsync


def files(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def drifted(root: Path) -> tuple[str, ...]:
    (root / DOCKERFILE).write_text("FROM scratch\n")
    return "render", CPU_STACK


def measured(root: Path) -> tuple[str, ...]:
    return "baseline", *speed_results.write_three(root), "--write"


@pytest.mark.usefixtures("fake_engine")
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
@pytest.mark.parametrize(
    ("prepare", "path"),
    [
        (drifted, DOCKERFILE),
        (lambda _root: ("lock", CPU_STACK), LOCK),
        (measured, str(speed_results.THRESHOLDS)),
        (lambda _root: ("build", CPU_STACK), f"build/{CPU_STACK}"),
    ],
    ids=["render", "lock", "baseline", "build"],
)
def test_a_disk_that_takes_no_bytes_is_exit_10_and_leaves_every_file_as_it_was(
    small_checkout, capsys, monkeypatch, *, prepare, path, number
):
    monkeypatch.setattr("stackcheck.recipe.lock.ask", lambda *_arguments: LOCKED)
    command = prepare(small_checkout)
    before = files(small_checkout)
    monkeypatch.setattr("stackcheck.files.atomic.os.fsync", refuse(number))
    done = call(capsys, *command)
    assert done.code == 10, done.err
    assert path in done.err
    assert os.strerror(number) in done.err
    assert "next: free disk space or fix the permissions" in done.err
    after = files(small_checkout)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if name.name.startswith(TEMPORARY)]
    assert all(name.is_relative_to(small_checkout / "build") for name in after.keys() - before.keys())


def test_a_wheel_cache_on_a_full_disk_is_exit_10_and_holds_nothing(tmp_path, monkeypatch):
    output = tmp_path / "output"
    output.mkdir()
    (output / "small-1.0-py3-none-any.whl").write_bytes(b"wheel")
    cache = WheelCache(tmp_path / "cache")

    def full(_source: str, target: str) -> None:
        Path(target).write_bytes(b"wh")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), target)

    monkeypatch.setattr("stackcheck.imaging.wheels.wheel_cache.shutil.copy", full)
    with pytest.raises(FileError, match="wheel cache") as caught:
        cache.keep("k" * 64, output)
    assert (caught.value.exit_code, caught.value.where) == (10, str(tmp_path / "cache"))
    assert list(cache.folder.iterdir()) == []
    assert not cache.has("k" * 64)
