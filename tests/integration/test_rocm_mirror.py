"""All ROCm stacks against a local mirror, from the lock to the refusal for want of a device.

In: the committed matrix and templates, and a mirror that `rocm_mirror` makes: indexes with a login, a signed
archive of AMD's packages, the distribution's archive, a registry with bases. Out: locks, images, verdicts.
The same commands lock and build on the real hosts where they can be reached. What is inside the wheels is a
stand-in: this proves the path, and nothing about a GPU.
"""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

import rocm_archives
import rocm_bases
import rocm_mirror
import waits
from bridge import bridge_address
from rocm_mirror import Mirror
from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine
from stackcheck.imaging.image import load_image
from stackcheck.matrix import resolve
from stackcheck.oci.image_layout import ImageLayout
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
SELECTOR = "rocm*-torch*"
ABSENT = "vendor amd was named and no AMD device is visible"
REFUSED = 6
FETCHED = ("/pypi/", "/pytorch/", "/amd/")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Site:
    """A checkout on a machine that reaches the mirror alone."""

    mirror: Mirror
    root: Path
    environment: dict[str, str]

    def stackcheck(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stackcheck", *arguments, "--root", str(self.root)]
        return run_program(command, env=self.environment, timeout=2000)


@pytest.fixture(scope="module")
def site(tmp_path_factory, registry: str) -> Iterator[Site]:
    host_setup.ensure_engine(lambda _line: None)
    folder = tmp_path_factory.mktemp("site")
    stacks = resolve.load_stacks(ROOT, (SELECTOR,))
    assert len(stacks) == 10
    with rocm_mirror.served(folder / "mirror", bridge_address()) as mirror:
        rocm_mirror.fill(mirror, stacks)
        rocm_bases.push_bases(stacks, registry)
        mirror.write_configuration(registry)
        root = _checkout(folder / "checkout")
        yield Site(mirror=mirror, root=root, environment=mirror.environment(folder / "cache"))


def _checkout(root: Path) -> Path:
    """The committed sources without what was locked: nothing of an earlier lock may help."""
    root.mkdir()
    shutil.copy(ROOT / "matrix.yaml", root)
    shutil.copytree(ROOT / "images", root / "images", ignore=shutil.ignore_patterns("*.lock", "pins.json"))
    for name in ("tests", "trainers"):
        (root / name).symlink_to(ROOT / name)
    return root


@pytest.fixture(scope="module")
def locked(site: Site) -> Site:
    done = site.stackcheck("lock", SELECTOR)
    assert done.returncode == 0, done.stderr
    rendered = site.stackcheck("render", SELECTOR)
    assert rendered.returncode == 0, rendered.stderr
    return site


@pytest.fixture(scope="module")
def built(locked: Site) -> Iterator[list[dict[str, Any]]]:
    """All ten, in one call."""
    try:
        done = locked.stackcheck("build", SELECTOR, "--json")
        assert done.returncode == 0, done.stderr[-8000:]
        yield json.loads(done.stdout)
    finally:
        _remove_images(locked.root)


def _remove_images(root: Path) -> None:
    engine = Engine.connect()
    for path in sorted(root.glob("build/*/image.json")):
        reference = json.loads(path.read_text())["reference"]
        if engine.has(reference):
            engine.remove(reference)
    shutil.rmtree(root / "build", ignore_errors=True)


def _pins(site: Site) -> dict[str, dict[str, Any]]:
    found = sorted((site.root / "images").glob("rocm*-torch*/pins.json"))
    return {path.parent.name: json.loads(path.read_text()) for path in found}


def test_all_ten_stacks_lock_against_the_mirror(locked):
    pins = _pins(locked)
    assert len(pins) == 10
    assert {name: found["missing"] for name, found in pins.items() if found["missing"]} == {}
    assert all(digest.startswith("sha256:") for found in pins.values() for digest in found["bases"].values())
    debs = {name: found["debs"]["amd-smi-lib"] for name, found in pins.items() if "debs" in found}
    assert len(debs) == 9  # ROCm 7.14 brings the library in a wheel
    assert all(len(deb["sha256"]) == 64 and deb["size_bytes"] > 0 for deb in debs.values())


def test_rocm_as_packages_brings_the_device_code_of_the_stacks_architectures_alone(locked):
    (path,) = (locked.root / "images").glob("rocm7.14*/requirements.lock")
    names = {line.partition("==")[0] for line in path.read_text().splitlines() if line.startswith("rocm")}
    assert names == {"rocm", "rocm-sdk-core", "rocm-sdk-libraries", "rocm-sdk-device-gfx942"}


def test_every_locked_package_has_a_hash(locked):
    locks = sorted((locked.root / "images").glob("rocm*-torch*/*.lock"))
    lines = [line for path in locks for line in path.read_text().splitlines() if "==" in line]
    assert lines
    assert [line for line in lines if not line.endswith(" \\")] == []


def test_no_lock_names_the_mirror_or_its_login(locked):
    hosts = (locked.mirror.address.partition("://")[2], rocm_mirror.PASSWORD)
    files = [path for path in (locked.root / "images").rglob("*") if path.is_file()]
    assert files
    assert [path for path in files for word in hosts if word.encode() in path.read_bytes()] == []


def test_the_list_for_a_site_has_every_file_that_was_fetched_with_its_hash(locked, built):
    assert built
    done = locked.stackcheck("mirror", "--print", "--json", SELECTOR)
    assert done.returncode == 0, done.stderr
    listed = [one for files in json.loads(done.stdout).values() for one in files]
    assert {one["kind"] for one in listed} == {"wheel", "source", "image", "deb", "apt", "key"}
    assert [one for one in listed if one["kind"] in {"wheel", "source", "image", "deb"} and one["note"]] == []
    there = {path.name: path for path in locked.mirror.tree.rglob("*") if path.is_file()}
    files = {
        one["name"].rpartition("/")[2]: one for one in listed if one["kind"] in {"wheel", "source", "deb"}
    }
    wrong = [n for n, one in files.items() if [rocm_archives.digest(there[n])] != one["sha256"]]
    assert wrong == []
    asked = {unquote(path).rpartition("/")[2] for path in locked.mirror.asked if path.startswith(FETCHED)}
    fetched = {name for name in asked if name.endswith((".whl", ".tar.gz")) or name.startswith("amd-smi-lib")}
    assert len(fetched) > 20
    assert fetched - set(files) == set()
    of_torch = {one["place"] for one in listed if one["name"].startswith("torch-")}
    assert "https://download.pytorch.org/whl/rocm7.2" in of_torch
    assert "https://repo.radeon.com/rocm/manylinux/rocm-rel-7.2.4/" in of_torch


def test_all_ten_stacks_build_in_one_call(built):
    assert len(built) == 10
    shared = [use["how"] for image in built for use in image["stages"]]
    assert "shared" in shared  # stages of equal keys are built once


def test_no_image_has_the_mirrors_login_or_address(built, locked, program_of):
    blobs: dict[
        str, Path
    ] = {}  # manifests, configs with their history, layers: what images share is read once
    for image in built:
        layout = ImageLayout(load_image(locked.root / "build" / image["id"] / "image.json").layout)
        blobs |= {blob.digest: layout.blob_path(blob.digest) for blob in layout.blobs()}
    secrets = {rocm_mirror.PASSWORD.encode(), locked.mirror.address.partition("://")[2].encode()}
    there = b"opt/stackcheck/stack.json"  # a name in one layer of each image: it is seen when layers are read
    zstd = program_of("zstd", "zstd")
    found = [_held(zstd, path, {*secrets, there}) for path in blobs.values()]
    assert sum(there in words for words in found) >= len(built)
    assert [words & secrets for words in found if words & secrets] == []


def _held(zstd: Path, path: Path, words: set[bytes]) -> set[bytes]:
    """Which of the words a blob holds; zstd unpacks also gzip, and hands on what is not compressed."""
    with subprocess.Popen([zstd, "-dcf", path], stdout=subprocess.PIPE) as unpacked:
        assert unpacked.stdout
        found: set[bytes] = set()
        before = b""
        read = functools.partial(unpacked.stdout.read, 1 << 20)
        for block in iter(lambda: waits.answer(read, "the next bytes of zstd"), b""):
            text = before + block
            found |= {word for word in words - found if word in text}
            before = block[-200:]
    assert unpacked.returncode == 0
    return found


IMPORTS = """
import importlib.util, sys
assert importlib.util.find_spec("amdsmi") is None, "torch would import it"
import torch, triton, flash_attn
assert torch.version.hip and not torch.cuda._HAS_PYNVML and torch.cuda.device_count() == 0
print(torch.__version__, torch.version.hip, triton.__version__, flash_attn.__version__)
"""


def test_torch_imports_in_every_image_and_finds_no_management_library(built):
    told = {image["id"]: _run(image["reference"], IMPORTS) for image in built}
    assert told["rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04"].startswith("2.13.0+rocm7.2 7.2.1")
    assert told["rocm7.2.4-torch2.9.1-fa2.8.3-py3.12-ubuntu24.04-amd"].startswith("2.9.1+rocm7.2.4.lw.")


READS = """
import os, sys
sys.path[:0] = ["/suites"]
from vendors import VendorAbsentError, amd_library
try:
    amd_library.open_library()
except VendorAbsentError as absent:
    print(absent)
import amdsmi
print(os.path.realpath(amdsmi.__file__))
"""


def test_the_suites_child_finds_the_library_of_the_images_own_release(built):
    for image in built:
        told = _run(image["reference"], READS, f"--volume={ROOT}/tests/acceptance:/suites:ro")
        assert "driver not loaded" in told
        release = image["id"].partition("-")[0].removeprefix("rocm")
        place = f"/opt/rocm-{release}/share" if release != "7.14.1" else "/_rocm_sdk_core/share"
        assert place in told, told


def _run(reference: str, program: str, *options: str) -> str:
    command = [
        "docker",
        "run",
        "--rm",
        "--network=none",
        "--read-only",
        *options,
        reference,
        "python",
        "-c",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, f"{reference}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "name",
    [
        "rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04",
        "rocm7.2.4-torch2.9.1-fa2.8.3-py3.12-ubuntu24.04-amd",
        "rocm7.14.1-torch2.14.1-fa2.8.3-py3.12-ubuntu24.04",
        "rocm6.2.4-torch2.6.0-fa2.7.4.post1-py3.10-ubuntu22.04",
    ],
)
def test_the_static_suite_passes_and_the_image_is_refused_for_want_of_a_device(built, locked, name, tmp_path):
    assert built
    done = locked.stackcheck(
        "images", name, "--anyway", "--force", "--json", "--to", f"oci:{tmp_path / 'dist'}"
    )
    assert done.returncode == REFUSED, done.stderr[-4000:]
    verdict = json.loads((locked.root / "build" / name / "verdict.json").read_text())
    assert (verdict["status"], ABSENT in verdict["reasons"]) == ("FAILED", True)
    result = json.loads((locked.root / "build" / name / "run" / "result.json").read_text())
    static = [one for one in result["checks"] if one["id"].startswith(("test_image.py", "test_static.py"))]
    wrong = [(one["id"], one["reason"]) for one in static if one["outcome"] not in {"passed", "skipped"}]
    assert wrong == []
    assert sum(one["outcome"] == "passed" for one in static) >= 10
    assert not (tmp_path / "dist").exists()
    assert rocm_mirror.PASSWORD not in json.dumps(result) + json.dumps(verdict) + done.stderr
