"""A file is there and whole, or not there: whenever somebody interrupts its writer."""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from small_images import quiet
from stackcheck.errors import FileError
from stackcheck.files import checkout
from stackcheck.files.atomic import UNUSABLE, write_atomically
from stackcheck.oci.documents import RegistryError
from stackcheck.oci.layout import OciLayout

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
def test_a_writer_interrupted_at_any_instruction_leaves_the_whole_file_or_nothing(tmp_path):
    number = 1
    while interrupted(tmp_path / "file", number):
        left = {found.name: found.read_bytes() for found in tmp_path.iterdir()}
        assert left in ({}, {"file": BODY}), f"interrupted at instruction {number}"
        (tmp_path / "file").unlink(missing_ok=True)
        number += 1
    assert number > 100, "the program was not interrupted at all"
    assert (tmp_path / "file").read_bytes() == BODY


def test_a_failing_source_leaves_nothing(tmp_path):
    def chunks() -> Any:
        yield b"half"
        raise RegistryError("the source ended early")

    with pytest.raises(RegistryError, match="ended early"):
        write_atomically(tmp_path / "file", chunks())
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_goes_away_with_the_next_one(tmp_path):
    layout = OciLayout(tmp_path / "dist")
    with layout.writing(quiet):
        pass
    left = [layout.root / ".tmp-1", layout.root / "blobs" / "sha256" / ".tmp-2"]
    for path in left:
        path.write_bytes(b"half")
    with layout.writing(quiet):
        assert not any(path.exists() for path in left)


@pytest.mark.parametrize("number", sorted(UNUSABLE))
def test_a_disk_that_cannot_be_written_is_exit_10_and_named(tmp_path, number):
    def chunks() -> Any:
        yield b"half"
        raise OSError(number, "no room")

    with pytest.raises(FileError) as caught:
        write_atomically(tmp_path / "file", chunks())
    assert (caught.value.where, caught.value.exit_code) == (str(tmp_path / "file"), 10)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_names_no_file_names_the_folder_of_builds(tmp_path):
    with pytest.raises(FileError) as caught, checkout.exclusive(tmp_path, "a test", print):
        raise OSError(errno.ENOSPC, "no room")
    assert caught.value.where == str(tmp_path / "build")
    with pytest.raises(OSError, match="/some/file"), checkout.exclusive(tmp_path, "a test", print):
        raise OSError(errno.ENOSPC, "no room", "/some/file")
