"""A base of distribution packages goes without the kernels of architectures that its stack does not name."""

import json
import os
from pathlib import Path

import pytest

from stackcheck import vendors
from stackcheck.files.digest import sha256_of
from stackcheck.imaging import base_sources, bootstrap
from stackcheck.imaging.plans import kernels
from stackcheck.matrix import resolve

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("hipcc", "librocblas-dev")


def stack(name: str) -> resolve.Stack:
    (found,) = resolve.load_stacks(ROOT, (name,))
    return found


def test_files_of_other_architectures_are_left_out_and_those_of_the_stack_kept() -> None:
    selected = kernels(stack("rocm5.7-debian13"))
    assert selected.excluded == ("/usr/lib/*/rocblas/*/library/*gfx*",)
    assert selected.included == ("/usr/lib/*/rocblas/*/library/*gfx90a*",)


@pytest.mark.parametrize("name", ["cpu-*", "cuda13.0-torch2.13.0-py3.11-debian12"])
def test_a_base_without_such_files_is_made_as_ever(name) -> None:
    assert kernels(stack(name)) == bootstrap.NOTHING_SELECTED


def test_what_is_left_out_is_part_of_the_key_of_a_base() -> None:
    every, wanted = vendors.module("amd").kernel_files(("gfx90a",))
    selected = bootstrap.Selected(excluded=every, included=wanted)
    keys = {
        bootstrap.key("trixie", PACKAGES),
        bootstrap.key("trixie", PACKAGES, selected),
        bootstrap.key("trixie", PACKAGES, bootstrap.Selected(excluded=every)),
    }
    assert len(keys) == 3
    assert bootstrap.key("trixie", PACKAGES) == bootstrap.key("trixie", PACKAGES, bootstrap.NOTHING_SELECTED)


def test_the_kept_files_come_after_the_left_out_as_the_last_match_counts(tmp_path) -> None:
    selected = bootstrap.Selected(excluded=("/a/*gfx*",), included=("/a/*gfx90a*",))
    way = base_sources.Way(name="an archive", sources="x")
    command = bootstrap._command("trixie", PACKAGES, selected, tmp_path / "rootfs.tar", way)
    assert command.index("--dpkgopt=path-exclude=/a/*gfx*") < command.index(
        "--dpkgopt=path-include=/a/*gfx90a*"
    )


def test_a_base_whose_tar_is_not_the_described_one_is_made_again(tmp_path) -> None:
    """It may be exchanged at the same size and time, by a rename."""
    tar, description = tmp_path / "x.tar", tmp_path / "x.json"
    tar.write_bytes(b"base")
    facts = {"digest": "sha256:" + sha256_of(tar), "packages": {}}
    description.write_text(json.dumps(facts))
    assert bootstrap.load_root_fs(description, reused=True) is not None
    status = tar.stat()
    other = tmp_path / "other"
    other.write_bytes(b"evil")
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    other.rename(tar)
    assert bootstrap.load_root_fs(description, reused=True) is None
