"""What a release offers, made for real: the wheel as the workflow builds it, and the image of the tool."""

import datetime as dt
import email
import hashlib
import json
import os
import subprocess
import zipfile
from typing import Any

import pytest
import yaml
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from markdown_it import MarkdownIt

import small_dist
import small_stacks
from by_path import module_at
from small_images import STACK_ID, make_image
from stackcheck import __version__
from stackcheck.engine.client import Engine
from stackcheck.oci.image_layout import ImageLayout

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = small_stacks.ROOT
SERVER, REPOSITORY = "https://git.example.org", "team/stackcheck"


def steps() -> list[str]:
    """The commands of the release workflow."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    return [step["run"] for step in workflow["jobs"]["files"]["steps"] if "run" in step]


def test_the_wheel_of_the_workflow_names_the_repository_that_ran_it(tmp_path):
    """The step itself runs, in a clone, with the variables that GitHub sets."""
    clone = tmp_path / "clone"
    subprocess.run(("git", "clone", "--quiet", "--no-hardlinks", ROOT, clone), check=True)
    (clone / ".venv").symlink_to(ROOT / ".venv")
    (step,) = (each for each in steps() if ".ci/release.py" in each)
    told = {"GITHUB_SERVER_URL": SERVER, "GITHUB_REPOSITORY": REPOSITORY, "GITHUB_REF_NAME": "HEAD"}
    subprocess.run(("sh", "-euc", step), cwd=clone, env=os.environ | told, check=True)

    (wheel,) = (clone / "build" / "release").glob("*.whl")
    sums = (clone / "build" / "release" / "SHA256SUMS").read_text()
    assert sums == f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel.name}\n"
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
        assert "stackcheck/checkout/matrix.yaml" in archive.namelist()
    url = f"{SERVER}/{REPOSITORY}"
    assert f"Homepage, {url}" in metadata.get_all("Project-URL", [])
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = list(addresses(metadata.get_payload()))
    assert len(links) > 20
    assert [link for link in links if not link.startswith("https://")] == []
    assert subprocess.run(
        ("git", "status", "--porcelain"), cwd=clone, capture_output=True, check=True
    ).stdout in {b"", b"?? .venv\n"}


def addresses(text: Any) -> Any:
    for block in MarkdownIt("commonmark").enable("table").parse(text):
        for token in block.children or ():
            if token.type in {"link_open", "image"}:
                yield str(token.attrs["src" if token.type == "image" else "href"])


@pytest.fixture(scope="module")
def tool(engine: Engine, tmp_path_factory) -> Any:
    """The image of the tool, and its folder."""
    folder = tmp_path_factory.mktemp("tool")
    made = module_at(ROOT / ".ci" / "tool_image.py", "tool_image")
    digest = made.build(folder, no_cache=False)
    yield made, folder, digest
    engine.remove(made.REFERENCE)


def run(*words: str, mounts: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A verb in the image of the tool: no network, nothing to write to that stays."""
    reference = f"stackcheck/tool:{__version__}"
    closed = (
        "--network=none",
        "--read-only",
        "--tmpfs=/tmp",
        "--tmpfs=/home/stackcheck:uid=1000",
        "--cap-drop=ALL",
    )
    command = ("docker", "run", "--rm", *closed, *(f"--volume={each}" for each in mounts), reference, *words)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_image_of_the_tool_runs_its_verbs_without_root(tool, tmp_path):
    _, folder, _ = tool
    config = ImageLayout(folder / "oci").config()["config"]
    assert (config["User"], config["Entrypoint"]) == ("1000:1000", ["stackcheck"])
    assert run("--version").stdout == f"stackcheck {__version__}\n"
    listed = run("list", "--json")
    assert STACK_ID in {stack["id"] for stack in json.loads(listed.stdout)["stacks"]}

    dist = tmp_path / "dist"
    small_dist.release(make_image(tmp_path / "image"), dist, now=dt.datetime.now(dt.UTC))
    key = small_dist.KEY.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (dist / "stackcheck.pub").write_bytes(key)
    for path in (tmp_path, dist, *dist.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    words = ("verify", f"oci:/dist:{STACK_ID}", "--key", "/dist/stackcheck.pub", "--device-model", "CPU")
    done = run(*words, mounts=(f"{dist}:/dist:ro",))
    assert done.stdout.startswith("VERIFIED"), done.stderr
    refused = run(*words, "--max-age", "0m", mounts=(f"{dist}:/dist:ro",))
    assert refused.returncode == 7, refused.stderr


def test_the_image_of_the_tool_has_one_digest(tool, tmp_path):
    """Each step ran again: the packages are the same, and no time of the build is in it."""
    made, _, digest = tool
    assert made.build(tmp_path, no_cache=True) == digest
