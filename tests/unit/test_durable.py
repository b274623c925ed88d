"""A file is there and whole, or not there: whenever somebody interrupts its writer."""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING, Any

import pytest

from small_images import quiet
from stackcheck import lockfile
from stackcheck.durable import DiskError, write_atomically
from stackcheck.errors import ConfigurationError
from stackcheck.layout import OciLayout
from stackcheck.oci import RegistryError

if TYPE_CHECKING:
    from pathlib import Path
    from types import FrameType

BODY = b"whole"


class InterruptAt:
    """Raises KeyboardInterrupt before the n-th instruction that the program runs, libraries included."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, argument: Any) -> InterruptAt:  # noqa: ARG002  # a tracer
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def interrupted(path: Path, number: int) -> bool:
    """Write the file and interrupt that at an instruction; whether the writer lived that long."""
    before = sys.gettrace()
    sys.settrace(InterruptAt(number))
    try:
        write_atomically(path, (BODY[:2], BODY[2:]))
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.timeout(60)  # a library interrupted while it holds a lock would wait for ever
def test_a_writer_interrupted_at_any_instruction_leaves_the_whole_file_or_nothing(tmp_path: Path) -> None:
    number = 1
    while interrupted(tmp_path / "file", number):
        left = {found.name: found.read_bytes() for found in tmp_path.iterdir()}
        assert left in ({}, {"file": BODY}), f"interrupted at instruction {number}"
        (tmp_path / "file").unlink(missing_ok=True)
        number += 1
    assert number > 100, "the program was not interrupted at all"
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_failing_source_leaves_nothing(tmp_path: Path) -> None:
    def chunks() -> Any:
        yield b"half"
        raise RegistryError("the source ended early")

    with pytest.raises(RegistryError, match="ended early"):
        write_atomically(tmp_path / "file", chunks())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_goes_away_with_the_next_one(tmp_path: Path) -> None:
    layout = OciLayout(tmp_path / "dist")
    with layout.writing(quiet):
        pass
    left = [layout.root / ".tmp-1", layout.root / "blobs" / "sha256" / ".tmp-2"]
    for path in left:
        path.write_bytes(b"half")
    with layout.writing(quiet):
        assert not any(path.exists() for path in left)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_nothing_is_told_with_its_place_by_whoever_holds_the_checkout(
    tmp_path: Path, number: int
) -> None:
    with pytest.raises(ConfigurationError) as caught, lockfile.exclusive(tmp_path, "a test", print):
        raise OSError(number, "no room", "/some/file")
    assert (caught.value.where, caught.value.exit_code) == ("/some/file", 2)
    with pytest.raises(ConfigurationError) as caught, lockfile.exclusive(tmp_path, "a test", print):
        raise OSError(number, "no room")
    assert caught.value.where == str(tmp_path / "build")


def test_the_place_of_a_copy_that_does_not_fit_is_where_it_was_to_go(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught, lockfile.exclusive(tmp_path, "a test", print):
        raise OSError(errno.ENOSPC, "no room", "/a/source", None, "/a/target")  # as shutil says it
    assert caught.value.where == "/a/target"


def test_other_failures_are_not_taken_for_a_full_disk(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError), lockfile.exclusive(tmp_path, "a test", print):
        raise IsADirectoryError(errno.EISDIR, "is a folder", "/some/folder")


def test_the_failure_is_of_the_kind_that_the_writer_asks_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for kind, code in ((DiskError, 8), (ConfigurationError, 2)):
        with pytest.raises(kind) as caught:
            write_atomically(tmp_path / "file" / "below", (b"x",), failure=kind)
        assert caught.value.exit_code == code
