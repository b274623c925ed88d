"""Which architectures a file holds machine code for, as both vendors' compilers and ROCm's archives say."""

import ctypes
import struct
from pathlib import Path

import pytest

import device_code
from vendors import amd_software, kpack, nvidia_software, software


@pytest.fixture
def file(tmp_path):
    def write(data: bytes):
        path = tmp_path / "library.so.1"
        path.write_bytes(data)
        return path

    return write


def test_every_translation_unit_of_a_hip_library_is_read(file):
    held = amd_software.architectures(file(device_code.amd_library(["gfx90a", "gfx942", "gfx950"])))
    assert held == {"gfx90a", "gfx942", "gfx950"}


def test_a_bundle_that_the_compiler_wrote_alone_is_read(file):
    assert amd_software.architectures(file(device_code.bundle(["gfx942"]))) == {"gfx942"}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_compressed_bundle_of_each_version_is_read(file, version):
    data = device_code.elf({".hip_fatbin": device_code.compressed(["gfx90a", "gfx942"], version=version)})
    assert amd_software.architectures(file(data)) == {"gfx90a", "gfx942"}


def test_a_bundle_compressed_by_zstd_is_read(file):
    try:
        zstd = ctypes.CDLL("libzstd.so.1")
    except OSError:
        pytest.skip("this machine has no libzstd to compress with")
    plain = device_code.bundle(["gfx950"])
    packed = ctypes.create_string_buffer(1 << 12)
    size = zstd.ZSTD_compress(packed, len(packed), plain, len(plain), 3)
    head = b"CCOB" + struct.pack("<HHII", 2, 1, size + 24, len(plain)) + bytes(8)
    assert amd_software.architectures(file(head + packed.raw[:size])) == {"gfx950"}


def test_an_entry_without_code_counts_for_nothing(file):
    data = device_code.bundle(["gfx90a"]).replace(struct.pack("<QQ", 4096, 8), struct.pack("<QQ", 4096, 0))
    assert amd_software.architectures(file(data)) == frozenset()


def test_machine_code_of_a_cuda_library_is_read_and_ptx_is_not(file):
    data = device_code.elf({".nv_fatbin": device_code.fatbin(["sm_80", "sm_90"], ptx=["sm_120"])})
    assert nvidia_software.architectures(file(data)) == {"sm_80", "sm_90"}


def test_regions_that_follow_each_other_are_all_read(file):
    regions = device_code.fatbin(["sm_80"]) + bytes(40) + device_code.fatbin(["sm_100"])
    assert nvidia_software.architectures(file(device_code.elf({"__nv_relfatbin": regions}))) == {
        "sm_80",
        "sm_100",
    }


@pytest.mark.parametrize("reader", [amd_software.architectures, nvidia_software.architectures])
@pytest.mark.parametrize("data", [b"text", b"\x7fELF\x01\x01" + bytes(60), device_code.elf({".text": b"x"})])
def test_a_file_without_device_code_holds_none(file, reader, data):
    assert reader(file(data)) == frozenset()


@pytest.mark.parametrize(
    ("arch", "compiled", "covered"),
    [
        ("sm_90", ["sm_80", "sm_90"], True),
        ("sm_86", ["sm_80"], True),
        ("sm_80", ["sm_86"], False),
        ("sm_90", ["sm_80", "compute_80"], False),
        ("sm_100", ["sm_90"], False),
        ("sm_103", ["sm_100"], True),
    ],
)
def test_cuda_code_runs_on_later_minors_of_its_major(arch, compiled, covered):
    assert nvidia_software.covers(arch, compiled) is covered


def test_hip_code_runs_on_its_own_architecture_only():
    assert not amd_software.covers("gfx942", ["gfx90a", "gfx950"])


@pytest.mark.parametrize(
    ("path", "stem"),
    [
        ("/usr/lib/libgomp.so.1.0.0", "libgomp"),
        ("/site/torch/lib/libgomp-a34b3233.so.1", "libgomp"),
        ("/site/nvidia/cudnn/lib/libcudnn_ops.so.9", "libcudnn_ops"),
        ("/site/torch/lib/libtorch_cpu.so", "libtorch_cpu"),
        ("/site/numpy.libs/libscipy_openblas64_-32a4b2a6.so", "libscipy_openblas64_"),
    ],
)
def test_packagers_additions_do_not_hide_what_a_library_is(path, stem):
    assert software.stem(path) == stem


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "cpu"])
def test_every_vendor_has_the_same_names(vendor):
    missing = [name for name in software.Software.__annotations__ if not hasattr(software.of(vendor), name)]
    assert not missing
    assert callable(software.of(vendor).architectures)
    assert callable(software.of(vendor).covers)


NAME = "lib/librccl.so.1.0"


@pytest.fixture
def site(tmp_path) -> Path:
    """A library without code in lib/, and the archives of two architectures beside that folder."""
    (tmp_path / "lib").mkdir()
    (tmp_path / ".kpack").mkdir()
    (tmp_path / "lib/librccl.so.1").write_bytes(device_code.split_library(NAME))
    for arch in ("gfx90a", "gfx942"):
        (tmp_path / f".kpack/blas_{arch}.kpack").write_bytes(device_code.kpack(arch, [NAME, "lib/other.so"]))
    return tmp_path


def held(site: Path) -> frozenset[str]:
    return amd_software.architectures(site / "lib/librccl.so.1")


def test_the_archives_that_a_library_names_are_its_code(site):
    assert held(site) == {"gfx90a", "gfx942"}


def test_an_architecture_without_an_archive_is_not_held(site):
    (site / ".kpack/blas_gfx942.kpack").unlink()
    assert held(site) == {"gfx90a"}


def test_an_archive_with_the_code_of_other_libraries_alone_holds_nothing(site):
    (site / ".kpack/blas_gfx942.kpack").write_bytes(device_code.kpack("gfx942", ["lib/other.so"]))
    assert held(site) == {"gfx90a"}


def test_a_variant_of_an_architecture_counts_for_it(site):
    (site / ".kpack/blas_gfx942.kpack").unlink()
    (site / ".kpack/blas_gfx942:xnack+.kpack").write_bytes(device_code.kpack("gfx942:xnack+", [NAME]))
    assert held(site) == {"gfx90a", "gfx942"}


def test_what_is_left_of_a_librarys_own_section_counts_for_nothing(site):
    """Zeroing keeps the bytes of a page that the section shares with others."""
    left = {
        ".hip_fatbin": device_code.bundle(["gfx950"]),
        ".rocm_kpack_ref": device_code.kpack_reference(NAME),
    }
    (site / "lib/librccl.so.1").write_bytes(device_code.elf(left))
    assert held(site) == {"gfx90a", "gfx942"}


def test_no_cut_of_an_archive_passes_for_a_whole_one(site):
    whole = device_code.kpack("gfx942", [NAME])
    for length in range(0, len(whole), 7):
        (site / ".kpack/blas_gfx942.kpack").write_bytes(whole[:length])
        with pytest.raises((ValueError, struct.error)):
            held(site)


def test_a_table_without_end_is_refused():
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
def test_values_of_the_specification_are_read(data, value):
    assert kpack.unpack(data) == value
