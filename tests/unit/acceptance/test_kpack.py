"""Device code in archives beside a library, as ROCm's wheels keep it from 7.13 on."""

import struct
from pathlib import Path

import pytest

import device_code
from vendors import amd_software, kpack

NAME = "lib/librccl.so.1.0"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A library without code in lib/, and the archives of two architectures beside that folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / ".kpack").mkdir()
    (tmp_path / "lib/librccl.so.1").write_bytes(device_code.split_library(NAME))
    for arch in ("gfx90a", "gfx942"):
        (tmp_path / f".kpack/blas_{arch}.kpack").write_bytes(device_code.kpack(arch, [NAME, "lib/other.so"]))
    return tmp_path


def held(site: Path) -> frozenset[str]:
    return amd_software.architectures(site / "lib/librccl.so.1")


def test_the_archives_that_a_library_names_are_its_code(site: Path) -> None:
    assert held(site) == {"gfx90a", "gfx942"}


def test_an_architecture_without_an_archive_is_not_held(site: Path) -> None:
    (site / ".kpack/blas_gfx942.kpack").unlink()
    assert held(site) == {"gfx90a"}


def test_an_archive_with_the_code_of_other_libraries_alone_holds_nothing(site: Path) -> None:
    (site / ".kpack/blas_gfx942.kpack").write_bytes(device_code.kpack("gfx942", ["lib/other.so"]))
    assert held(site) == {"gfx90a"}


def test_a_variant_of_an_architecture_counts_for_it(site: Path) -> None:
    (site / ".kpack/blas_gfx942.kpack").unlink()
    (site / ".kpack/blas_gfx942:xnack+.kpack").write_bytes(device_code.kpack("gfx942:xnack+", [NAME]))
    assert held(site) == {"gfx90a", "gfx942"}


def test_what_is_left_of_a_librarys_own_section_counts_for_nothing(site: Path) -> None:
    """Zeroing keeps the bytes of a page that the section shares with others."""
    left = {
        ".hip_fatbin": device_code.bundle(["gfx950"]),
        ".rocm_kpack_ref": device_code.kpack_reference(NAME),
    }
    (site / "lib/librccl.so.1").write_bytes(device_code.elf(left))
    assert held(site) == {"gfx90a", "gfx942"}


def test_no_cut_of_an_archive_passes_for_a_whole_one(site: Path) -> None:
    whole = device_code.kpack("gfx942", [NAME])
    for length in range(0, len(whole), 7):
        (site / ".kpack/blas_gfx942.kpack").write_bytes(whole[:length])
        with pytest.raises((ValueError, struct.error)):
            held(site)


def test_a_table_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="nested"):
        kpack.unpack(b"\x91" * 10_000)


@pytest.mark.parametrize(
    ("data", "value"),
    [
        (b"\x82\xa1a\x01\xa1b\xff", {"a": 1, "b": -1}),
        (b"\x93\xc0\xc2\xc3", [None, False, True]),
        (b"\xcd\x01\x00", 256),
        (b"\xd1\xff\x00", -256),
        (b"\xcb\x3f\xf8\0\0\0\0\0\0", 1.5),
        (b"\xc4\x02ab", b"ab"),
        (b"\xd9\x03abc", "abc"),
        (b"\xdc\x00\x01\x05", [5]),
        (b"\xde\x00\x01\x05\x06", {5: 6}),
    ],
)
def test_values_of_the_specification_are_read(data: bytes, value: object) -> None:
    assert kpack.unpack(data) == value
