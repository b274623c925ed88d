"""Every Triton release of the matrix compiles the project's kernels, and the table of instructions holds.

Slow: one wheel of about 200 MB a release, unpacked 550 to 1,000 MB, one environment at a time, half a minute
to a minute and a half each on one core. No GPU and no torch. Releases before 3.5 have no linker for AMD in
the package index's wheel: the host's (Debian: lld-19) stands for the one that ROCm's own wheels bring.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stackcheck.recipe import indexes
from test_static import EXPECTED, MATRIX_OF_BF16, SHARED_BYTES
from waits import run_program

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).parent / "assets/triton_release.py"
RELEASES = ("3.2.0", "3.3.1", "3.4.0", "3.5.1", "3.6.0", "3.7.1", "3.8.0", "3.9.0")
WITHOUT_A_LINKER = ("3.2.0", "3.3.1", "3.4.0")
# What a release cannot compile, because it is older than the architecture or the format. The compiler says so
# or dies (3.3.1 for sm_103; until 3.5 no ptxas knows it), or takes an older GPU's instructions: 3.2 gfx942's
# for gfx950, and before 3.5 sm_120 multiplies fp8 in fp16.
TOO_OLD = {
    *(("3.2.0", arch) for arch in ("gfx950", "sm_100", "sm_103", "sm_120")),
    *((release, arch) for release in ("3.3.1", "3.4.0") for arch in ("sm_103", "sm_120")),
    ("3.5.1", "sm_103"),
}
SPILLED = {("3.3.1", "sm_89"): 5}  # bytes, of products in 16 bits; no stack declares sm_89 with this release
# Shared memory and instructions of the largest tile are a choice of the release, spills never are.
TIMEOUT_S = 1200


@pytest.fixture(scope="module", params=RELEASES)
def release(request, tmp_path_factory, program_of: Callable[[str, str], Path]) -> Iterator[tuple[str, Any]]:
    """(release, report) from an environment that holds this Triton and nothing else, and is then deleted."""
    home = tmp_path_factory.mktemp("triton")
    python = home / "env/bin/python"
    venv.create(home / "env", with_pip=False, symlinks=True)
    # uv unpacks the large wheels in half of pip's processor time.
    install = (Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", python)
    alone = ("--no-config", "--no-cache", "--no-python-downloads", "--index-strategy", "unsafe-best-match")
    packages = (f"triton=={request.param}", "setuptools")  # Triton before 3.4 imports the second
    places = indexes.pip_places(find_links=True)
    subprocess.run((*install, *alone, *places, "--no-deps", *packages), check=True)
    environment = {**os.environ, "TRITON_CACHE_DIR": str(home / "cache")}
    if request.param in WITHOUT_A_LINKER:
        # 14 knows too old a code object only.
        environment["TRITON_HIP_LLD_PATH"] = str(program_of("ld.lld-19", "lld-19"))
    try:
        done = run_program((str(python), str(PROGRAM)), env=environment, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-3000:]
        yield request.param, json.loads(done.stdout.splitlines()[-1])
    finally:
        shutil.rmtree(home)


def test_the_releases_are_those_of_the_matrix():
    """Triton before 3.2 belongs to stacks of ROCm 6.1 and CUDA 12.1, and has another interface."""
    rules = yaml.safe_load((ROOT / "images/compat.yaml").read_text(encoding="utf-8"))
    named = [str(release) for release in rules["versions"]["triton"]]
    assert tuple(named[named.index("3.2.0") :]) == RELEASES


def test_matrix_instructions_are_the_expected_ones(release):
    version, report = release
    assert report["version"].startswith(version)
    wrong = {}
    for (arch, dtype), instruction in EXPECTED.items():
        found = report["tiles"][f"matmul {arch} {dtype} 64"]
        if (version, arch) in TOO_OLD:
            continue
        if found.get("matrix") != [instruction]:
            wrong[arch, dtype] = found
    assert not wrong


def test_no_tile_spills_or_needs_more_shared_memory_than_there_is(release):
    version, report = release
    wrong = []
    for name, found in report["tiles"].items():
        kernel, arch, dtype, block = name.split()
        if (version, arch) in TOO_OLD:
            continue
        spilled = (found["spills"] or 0) > SPILLED.get((version, arch), 0) if not found["error"] else True
        if spilled or found["shared_bytes"] > SHARED_BYTES[arch]:
            wrong.append((name, found))
        if (
            kernel == "matmul"
            and dtype == "bf16"
            and not all(map(MATRIX_OF_BF16.search, found.get("matrix") or [""]))
        ):
            wrong.append((name, found))
        if block == "64" and not found.get("wide_loads"):
            wrong.append((name, found))
    assert not wrong


def test_the_trainers_kernels_compile(release):
    version, report = release
    failed = {
        job: error
        for job, error in report["kernels"].items()
        if error and (version, job.split()[1]) not in TOO_OLD
    }
    assert report["kernels"]
    assert not failed
