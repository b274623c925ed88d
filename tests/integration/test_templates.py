"""The template's stages that compile, built for real: on this machine that is all of them but ROCm's CK.

In: the stack `cpu`, turned into one that has an extension, and locked and rendered as any stack is. Out: a
build by `docker buildx` alone, of the stages up to a proof that runs in what the final stage holds.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from stackcheck import (
    bootstrap,
    extensions,
    host_setup,
    indexes,
    lock,
    locked,
    render,
    resolve,
    wheelhouse,
    wheels,
)
from stackcheck.stack import FlashAttention, Package, Stack
from stackcheck.upstream import Upstream

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "images"
CPU = resolve.load_stacks(ROOT, ("cpu-*",))[0]
TIMEOUT_S = 800
EM_CUDA = 190


def silent(_line: str) -> None:
    pass


def with_extension(**changes: object) -> Stack:
    """The stack `cpu` with the fewest packages, and one extension."""
    return dataclasses.replace(
        CPU,
        runtime="rocm",
        vendor="amd",
        runtime_version="7.14.1",
        layout="amdrocm",
        archs=("gfx942",),
        triton=Package(name="triton", version="3.7.1"),
        requirements=("torch==2.13.0+cpu", "numpy==2.4.6", "triton==3.7.1"),
        missing=(),
        **changes,
    )


def with_triton_backend() -> Stack:
    """One stack for two tests: what the first built, the second finds in the builder's cache."""
    flash = FlashAttention(version="2.8.3", form="source", backend="triton", sha256=None)
    env = {**CPU.env, "FLASH_ATTENTION_TRITON_AMD_ENABLE": "TRUE"}
    return with_extension(id="proof-flash-attn-triton", flash_attn=flash, env=env)


def prepare(stack: Stack, folder: Path, upstream: Upstream | None = None) -> Path:
    """Lock and render a stack as `stackcheck lock` and `render` do; its folder, with the base in it."""
    context = folder / stack.id
    context.mkdir()
    done = lock.lock(stack, folder, upstream)
    assert done.missing == ()
    for name, text in render.render(stack, IMAGES).items():
        (context / name).write_text(text)
    assert stack.base.suite
    bases = ROOT / "build" / "bases"
    made = bootstrap.bootstrap(stack.base.suite, stack.base.packages, bases, report=silent)
    os.link(made.path, context / "rootfs.tar")
    return context


def build(
    context: Path, target: str, out: Path, proof: str = "", extra: Path | None = None, **options: str
) -> Path:
    """Build a target of a folder's Dockerfile as a user would, with `proof` after it; the target's files."""
    host_setup.ensure_engine(silent)
    scratch = context.parent
    settings = wheels.host_settings()
    wanted = [found for path in sorted(context.glob("*.lock")) for found in locked.read(path.read_text())]
    named = wheelhouse.look(wanted, settings, {}).link(scratch / "wheels")
    if extra:
        shutil.copy(extra, scratch / "wheels")
    (scratch / "pip.conf").write_text(settings.pip_conf(wheelhouse=bool(named)))
    (scratch / "sources").write_text(wheels.apt_sources(CPU.os))
    secrets = {"pip_conf": scratch / "pip.conf", "apt_sources": scratch / "sources"}
    secrets |= {"ca": settings.ca} if settings.ca else {}
    with (context / "Dockerfile").open("a") as file:
        file.write(proof)
    command = ["docker", "buildx", "build", "--progress=plain", "--target", target]
    command += [f"--secret=id={name},src={path}" for name, path in secrets.items()]
    command += [f"--build-context=wheelhouse={scratch / 'wheels'}"]
    command += [f"--build-arg=SOURCE_DATE_EPOCH={bootstrap.SOURCE_DATE_EPOCH}"]
    command += [f"--output=type=local,dest={out}", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(
        [*command, str(context)], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return out


# In what the final stage holds, as the user that it has. A backend asks for the GPU's architecture when it is
# loaded: the stack's is told, as there is none here.
ATTENTION = """
FROM final AS proved
ENV HOME=/tmp
RUN <<'EOF' python3
import flash_attn, torch, triton
import flash_attn.flash_attn_interface as interface
from pathlib import Path
backend = interface.flash_attn_gpu.__name__
Path("/tmp/proof").write_text(f"{flash_attn.__version__} {backend} {torch.__version__} {triton.__version__}")
EOF
RUN ! command -v g++ && ! command -v hipcc && ! command -v ninja
FROM scratch AS proof
COPY --from=proved /tmp/proof /
"""


def test_flash_attentions_triton_backend_is_built_without_a_compiler_and_loads(tmp_path: Path) -> None:
    context = prepare(with_triton_backend(), tmp_path)
    proof = build(context, "proof", tmp_path / "proof", ATTENTION) / "proof"
    assert proof.read_text() == "2.8.3 flash_attn.flash_attn_triton_amd.interface_fa 2.13.0+cpu 3.7.1"
    first = build(context, "flash-attn", tmp_path / "first")
    again = build(context, "flash-attn", tmp_path / "again", **{"no-cache-filter": "flash-attn-build"})
    (name,) = (path.name for path in first.iterdir())
    assert (first / name).read_bytes() == (again / name).read_bytes()


# Somebody installs into a finished image, as its owner: also without the constraints, to see that they alone
# are what refuses it.
FREEZE = """
FROM final AS proved
USER root
RUN --mount=type=bind,from=offers,target=/offers --network=none <<'EOF' bash
tell() { if "${@:2}" > /dev/null 2>&1; then echo "$1: yes"; else echo "$1: no"; fi >> /tmp/proof; }
pip="pip install --no-index --find-links /offers --no-cache-dir"
uv="/offers/uv pip install --python /opt/venv/bin/python --offline --no-index --find-links /offers"
for wanted in torch==9.9 triton==9.9 wants-torch wants-triton; do
    tell "pip could $wanted" env -u PIP_CONSTRAINT $pip --dry-run "$wanted"
    tell "uv could $wanted" env -u UV_CONSTRAINT $uv --dry-run "$wanted"
    tell "pip does $wanted" $pip "$wanted"
    tell "uv does $wanted" $uv "$wanted"
done
tell "pip does harmless" $pip harmless
tell "uv does harmless-too" $uv harmless-too
python -c 'import torch, triton; print("still", torch.__version__, triton.__version__)' >> /tmp/proof
EOF
FROM scratch AS proof
COPY --from=proved /tmp/proof /
"""


def test_nothing_installed_later_replaces_torch_or_triton(tmp_path: Path) -> None:
    context = prepare(with_triton_backend(), tmp_path)
    offers = tmp_path / "offers"
    offers.mkdir()
    offered = {"wants-torch": "torch==9.9", "wants-triton": "triton==9.9", "harmless": "torch"}
    for name, needs in {"torch": "", "triton": "", **offered, "harmless-too": "triton"}.items():
        offer(offers, name, needs)
    shutil.copy(Path(sys.executable).with_name("uv"), offers / "uv")
    context_of_offers = {"build-context": f"offers={offers}"}
    proof = build(context, "proof", tmp_path / "out", FREEZE, **context_of_offers) / "proof"
    told = proof.read_text().splitlines()
    wanted = ("torch==9.9", "triton==9.9", "wants-torch", "wants-triton")
    expected = [
        line
        for name in wanted
        for line in (
            f"pip could {name}: yes",
            f"uv could {name}: yes",
            f"pip does {name}: no",
            f"uv does {name}: no",
        )
    ]
    expected += ["pip does harmless: yes", "uv does harmless-too: yes", "still 2.13.0+cpu 3.7.1"]
    assert told == expected


def offer(folder: Path, name: str, needs: str, version: str = "9.9", tag: str = "py3-none-any") -> Path:
    """A wheel that holds nothing but its metadata."""
    info = f"{name.replace('-', '_')}-{version.partition('+')[0]}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version.partition('+')[0]}\n"
    metadata += f"Requires-Dist: {needs}\n" if needs else ""
    path = folder / f"{name.replace('-', '_')}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        archive.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


class Releases(Upstream):
    """A release page that lists one wheel."""

    def __init__(self, sha256: str) -> None:
        super().__init__()
        self.sha256 = sha256

    def wheel_sha256(self, version: str, wheel: str) -> str:
        assert wheel.startswith(f"flash_attn-{version}+cu12")
        return self.sha256


@pytest.mark.parametrize("right", [True, False], ids=["right checksum", "another checksum"])
def test_an_official_wheel_goes_in_by_its_checksum_alone(tmp_path: Path, *, right: bool) -> None:
    stack = dataclasses.replace(
        with_extension(id="proof-official-wheel"),
        runtime="cuda",
        vendor="nvidia",
        runtime_version="12.8",
        layout=None,
        archs=("sm_90",),
        cxx11abi="TRUE",
        flash_attn=FlashAttention(version="2.8.3", form="wheel", backend=None, sha256=None),
    )
    folder = tmp_path / "official"
    folder.mkdir()
    wheel = offer(
        folder, "flash-attn", "torch", "2.8.3+cu12torch2.13cxx11abiTRUE", "cp311-cp311-linux_x86_64"
    )
    sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()
    context = prepare(stack, tmp_path, Releases(sha256 if right else "0" * 64))
    out = tmp_path / "out"
    if right:
        build(context, "flash-attn", out, extra=wheel)
        assert [path.read_bytes() for path in out.iterdir()] == [wheel.read_bytes()]
    else:
        with pytest.raises(AssertionError, match="THESE PACKAGES DO NOT MATCH THE HASHES"):
            build(context, "flash-attn", out, extra=wheel)


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


def test_cuda_is_compiled_with_the_compiler_of_the_index_for_every_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
