"""The exported tar is taken by others' tools, and what they get is the image that was tested.

skopeo reads it in both formats with the library that podman load, Apptainer and CRI-O use. podman itself runs
in the slow half, because its package may have to be installed.
"""

import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shell_image
from stackcheck.oci.image_layout import ImageLayout

pytestmark = pytest.mark.integration

REFERENCE = "stackcheck/small:1"


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """A layout, and the tar that was made of it."""
    folder = tmp_path_factory.mktemp("export")
    shell_image.make_layout(folder / "oci")
    ImageLayout(folder / "oci").export(REFERENCE, folder / "image.tar")
    return folder / "oci", folder / "image.tar"


def run(*arguments: str | Path) -> str:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_oci_archive_has_the_manifest_that_was_certified(skopeo, exported, tmp_path):
    layout, tar = exported
    inspected = json.loads(run(skopeo, "inspect", f"oci-archive:{tar}"))
    assert inspected["Digest"] == ImageLayout(layout).image().digest
    run(skopeo, "copy", "--preserve-digests", f"oci-archive:{tar}", f"oci:{tmp_path / 'again'}:tag")
    assert ImageLayout(tmp_path / "again").image().digest == ImageLayout(layout).image().digest


def test_a_docker_archive_has_the_config_that_was_tested(skopeo, exported, tmp_path):
    layout, tar = exported
    run(skopeo, "copy", f"docker-archive:{tar}", f"dir:{tmp_path / 'dir'}")
    config = json.loads((tmp_path / "dir" / "manifest.json").read_bytes())["config"]["digest"]
    assert config == ImageLayout(layout).image().document["config"]["digest"]


def test_an_archive_cut_short_is_refused(skopeo, exported, tmp_path):
    _, tar = exported
    short = tmp_path / "short.tar"
    short.write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    done = subprocess.run(
        [skopeo, "copy", f"oci-archive:{short}", f"dir:{tmp_path / 'dir'}"], check=False, capture_output=True
    )
    assert done.returncode != 0


@pytest.fixture
def podman(program_of: Callable[[str, str], Path]) -> Iterator[list[str]]:
    """podman with a store of its own; its paths have to be short."""
    program_of("podman", "podman")
    folder = tempfile.mkdtemp(prefix="podman-")
    command = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run", "--storage-driver", "vfs"]
    command += ["--cgroup-manager", "cgroupfs", "--events-backend", "file"]
    yield command
    subprocess.run([*command, "rmi", "--all", "--force"], check=False, capture_output=True)
    shutil.rmtree(folder)


@pytest.mark.slow
def test_podman_loads_and_runs_it(exported, podman):
    layout, tar = exported
    # podman asks for more open files than a container that runs this may give.
    limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024"]
    assert f"docker.io/{REFERENCE}" in run(*podman, "load", "--input", tar)
    found = run(*podman, "image", "inspect", "--format", "{{.Digest}}", REFERENCE)
    assert found.strip() == ImageLayout(layout).image().digest
    command = ["/bin/bash", "-c", "echo it runs"]
    assert run(*podman, "run", "--rm", "--network", "none", *limits, REFERENCE, *command) == "it runs\n"


def test_an_exported_image_loads_with_plain_docker(engine, small_image, tmp_path):
    ImageLayout(small_image.layout).export(small_image.reference, tmp_path / "image.tar")
    with tarfile.open(tmp_path / "image.tar") as tar:
        assert {"oci-layout", "index.json", "manifest.json"} <= set(tar.getnames())
    before = engine.inspect(small_image.reference).id
    engine.remove(small_image.reference)
    subprocess.run(
        ["docker", "load", "--input", str(tmp_path / "image.tar")], check=True, capture_output=True
    )
    assert engine.inspect(small_image.reference).id == before
