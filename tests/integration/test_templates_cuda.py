"""CUDA code is compiled by the compiler that the package index has, for real and without a GPU."""

import dataclasses
import io
import re
import struct
import tarfile
import zipfile

import pytest

from stackcheck.matrix.stack import Package, Stack
from stackcheck.recipe import extensions, indexes
from template_builds import build, prepare, with_extension

pytestmark = [pytest.mark.integration, pytest.mark.slow]

EM_CUDA = 190

# A package of one kernel, whose set-up calls nvcc as torch's extensions do: by CUDA_HOME, and for the
# architectures that the environment lists.
SMALL_SETUP = """
import os, subprocess
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
import torch

class Nvcc(build_ext):
    def build_extension(self, ext):
        home, archs = os.environ["CUDA_HOME"], os.environ["TORCH_CUDA_ARCH_LIST"].replace(".", "").split(";")
        assert int(os.environ["MAX_JOBS"]) >= 1 and os.path.exists(f"{home}/lib64/libcudart.so")
        out = self.get_ext_fullpath(ext.name)
        os.makedirs(os.path.dirname(out), exist_ok=True)
        codes = [flag for arch in archs for flag in ("-gencode", f"arch=compute_{arch},code=sm_{arch}")]
        shared = ["-shared", "-Xcompiler", "-fPIC", "--no-compress"]
        subprocess.run([f"{home}/bin/nvcc", *codes, *shared, *ext.sources, "-o", out], check=True)

setup(name="small-cuda", version="1.0", ext_modules=[Extension("small_cuda", ["scale.cu"])],
      cmdclass={"build_ext": Nvcc})
"""


SMALL_KERNEL = """
#include <cuda/std/limits>
__global__ void scale(float *x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= 2;
}
extern "C" void run(float *x, int n) { scale<<<(n + 255) / 256, 256>>>(x, n); }
"""


def small_cuda(stack: Stack, version: str) -> extensions.Extension:
    """As `extensions.py` says it of its own."""
    archs = ";".join(f"{arch[3:-1]}.{arch[-1]}" for arch in stack.archs)
    return extensions.Extension(
        name="small-cuda",
        version=version,
        form="source",
        because="a test",
        env={"TORCH_CUDA_ARCH_LIST": archs},
    )


def test_cuda_is_compiled_with_the_compiler_of_the_index_for_every_architecture(tmp_path, monkeypatch):
    archive = tmp_path / "index" / "small_cuda-1.0.tar.gz"
    archive.parent.mkdir()
    files = {"PKG-INFO": "Metadata-Version: 2.1\nName: small-cuda\nVersion: 1.0\n", "setup.py": SMALL_SETUP}
    with tarfile.open(archive, "w:gz") as tar:
        for name, text in {**files, "scale.cu": SMALL_KERNEL}.items():
            member = tarfile.TarInfo(f"small_cuda-1.0/{name}")
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
    places = indexes.pip_places
    own = f"--find-links={archive.parent}"
    monkeypatch.setattr(indexes, "pip_places", lambda *, find_links: [*places(find_links=find_links), own])
    monkeypatch.setitem(extensions._MAKERS, "small-cuda", small_cuda)
    stack = dataclasses.replace(
        with_extension(id="proof-cuda", flash_attn=None),
        runtime="cuda",
        vendor="nvidia",
        runtime_version="13.0",
        layout=None,
        archs=("sm_80", "sm_90", "sm_100"),
        extensions=(Package(name="small-cuda", version="1.0"),),
    )
    context = prepare(stack, tmp_path)
    (wheel,) = build(context, "small-cuda", tmp_path / "out", extra=archive).iterdir()
    with zipfile.ZipFile(wheel) as opened:
        (library,) = (name for name in opened.namelist() if name.endswith(".so"))
        code = opened.read(library)
    assert architectures(code) == {80, 90, 100}


def architectures(library: bytes) -> set[int]:
    """The compute capabilities of the device code inside a library: ELF files of machine EM_CUDA."""
    starts = (match.start() for match in re.finditer(b"\x7fELF", library))
    headers = ((struct.unpack_from("<H", library, at + 18)[0], at) for at in starts)
    flags = (struct.unpack_from("<I", library, at + 48)[0] for machine, at in headers if machine == EM_CUDA)
    return {(flag >> 8) & 0xFF for flag in flags}
