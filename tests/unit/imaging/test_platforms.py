"""Which wheels install where: what a lock asks for, and what fits a platform, a glibc and a Python."""

import platform as host

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.files import requirements
from stackcheck.imaging import platforms

AMD64 = platforms.InstallTarget(platform="linux/amd64", python="3.11", glibc=36)
ARM64 = platforms.InstallTarget(platform="linux/arm64", python="3.12", glibc=39)


@pytest.mark.parametrize(
    ("filename", "amd64", "arm64"),
    [
        ("a-1-py3-none-any.whl", True, True),
        ("a-1-cp311-cp311-manylinux_2_28_x86_64.whl", True, False),
        ("a-1-cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64.whl", True, False),
        ("a-1-cp39-abi3-manylinux2014_x86_64.whl", True, False),
        ("a-1-cp312-cp312-manylinux_2_39_aarch64.whl", False, True),
        ("a-1-cp312-cp312-manylinux_2_40_aarch64.whl", False, False),
        ("a-1-cp313-cp313-manylinux_2_28_x86_64.whl", False, False),
        ("a-1-cp311-cp311-win_amd64.whl", False, False),
        ("a-1-py3-none-manylinux1_x86_64.whl", True, False),
        ("a-1.tar.gz", True, True),
        ("not-a-wheel.whl", False, False),
    ],
)
def test_a_wheel_fits_by_its_tags(filename, amd64, arm64):
    assert (AMD64.takes(filename), ARM64.takes(filename)) == (amd64, arm64)


def test_the_file_is_the_one_that_pip_would_take():
    best = platforms.InstallTarget(platform="linux/amd64", python="3.12", glibc=39).best
    old, new = "a-1-cp312-cp312-manylinux2014_x86_64.whl", "a-1-cp312-cp312-manylinux_2_28_x86_64.whl"
    assert best((old, new, "a-1-cp311-cp311-manylinux_2_28_x86_64.whl", "a-1.tar.gz")) == new
    assert best(("a-1-py3-none-any.whl", old)) == old
    assert best(("a-1-cp312-cp312-manylinux_2_40_x86_64.whl", "a-1.tar.gz")) == "a-1.tar.gz"
    assert best(("a-1-cp312-cp312-macosx_11_0_arm64.whl",)) is None


@pytest.mark.parametrize(
    ("machine", "name"), [("x86_64", "linux/amd64"), ("aarch64", "linux/arm64"), ("riscv64", None)]
)
def test_the_hosts_own_platform(machine, name, monkeypatch):
    monkeypatch.setattr(host, "machine", lambda: machine)
    if name:
        assert platforms.native() == name
        return
    with pytest.raises(ConfigurationError, match="not built for this platform"):
        platforms.native()


def test_an_instruction_that_pins_by_hash_is_read_too():
    (found,) = requirements.read_packages(
        f"RUN echo 'flash-attn==2.8.3 --hash=sha256:{'d' * 64}' > flash-attn.txt"
    )
    assert (found.name, found.hashes) == ("flash-attn", frozenset({"d" * 64}))
    assert found.is_of("flash_attn-2.8.3.tar.gz")
    assert not found.is_of("flash_attn-2.8.4.tar.gz")
    assert not found.is_of("notes.txt")
