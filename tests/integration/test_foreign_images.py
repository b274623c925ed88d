"""Images as users bring them: the layouts of rocm/pytorch, NGC, python:3.12 and vLLM, on a real daemon.

What each runs or lacks, and the sentence that its user reads. The images share the layers of the cpu stack.
One goes the whole way by the command line, with all checks of the tier that certifies.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import small_stacks
from small_subjects import subject_of
from stackcheck.engine import buildx
from stackcheck.engine.client import Engine
from stackcheck.errors import ChecksFailedError, EngineError
from stackcheck.imaging import build
from stackcheck.imaging.image import Image
from stackcheck.oci.tags import label
from stackcheck.suite import interpreter, needed, sbom
from stackcheck.suite import run as suite
from stackcheck.suite.results import RunResult

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LAYOUTS = ("python", "rocm", "ngc", "uv")
NAME = "stackcheck-test/foreign:{}"
UV = "0.9.7"  # of the releases that write _virtualenv.pth
START = "test_image.py::test_nothing_runs_unasked_when_python_starts"
REQUIREMENTS = "test_image.py::test_pip_check_finds_no_conflict"
ONLY = "nothing_runs_unasked or pip_check"


@pytest.fixture(scope="module")
def layouts(engine: Engine, cpu_image: Image, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """The reference of the image in a layout; all are built at once."""
    context = tmp_path_factory.mktemp("foreign")
    shutil.copy(small_stacks.ASSETS / "foreign" / "Dockerfile", context)
    fetch_uv(context)
    with small_stacks.built_images(engine, NAME, LAYOUTS, context, STACK=cpu_image.reference) as references:
        yield references


def fetch_uv(folder: Path) -> None:
    fetch = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder))
    subprocess.run((*fetch, f"uv=={UV}"), check=True)
    (wheel,) = folder.glob("uv-*.whl")
    shutil.unpack_archive(wheel, folder / "unpacked", format="zip")
    (program,) = (folder / "unpacked").glob("uv-*.data/scripts/uv")
    program.chmod(0o755)
    program.rename(folder / "uv")
    shutil.rmtree(folder / "unpacked")
    wheel.unlink()


def run(engine: Engine, reference: str, folder: Path, *accepted: str) -> RunResult:
    """The quick checks of the suites in an image; the log is in `folder`."""
    subject = subject_of(reference, folder, *accepted)
    plan = suite.plan(subject, tier="smoke", root=small_stacks.ROOT, out=folder)
    return suite.run(dataclasses.replace(plan, only=ONLY), engine, out=folder, report=small_stacks.silent)


def outcomes(result: RunResult) -> dict[str, tuple[str, str | None]]:
    return {check.id: (check.outcome, check.reason) for check in result.checks}


PASSED = {START: ("passed", None), REQUIREMENTS: ("passed", None)}


@pytest.mark.parametrize(
    "layout",
    [
        ("rocm", "/opt/conda/envs/py_3.11/bin/python3", "conda:python 3.11.2"),
        ("ngc", "/usr/bin/python3", "deb:python3.11-minimal 3.11.2"),
    ],
    ids=("rocm", "ngc"),
)
def test_an_image_whose_python_is_of_a_package_runs_as_it_is(engine, layouts, tmp_path, layout):
    name, path, package = layout
    result = run(engine, layouts(name), tmp_path)
    assert outcomes(result) == PASSED
    assert result.interpreter
    assert result.interpreter.path == path
    assert (result.interpreter.package or "").startswith(package)
    assert "pytest" not in result.software  # the suites brought their own
    assert "NVIDIA Release" not in (tmp_path / "container.log").read_text()


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("python", "/usr/local/bin/python3.11"),
        ("uv", "/opt/uv/python/cpython-3.11.2-linux-x86_64-gnu/bin/python3.11"),
    ],
)
def test_an_image_whose_python_is_of_no_package_runs_once_its_digest_is_accepted(
    engine, layouts, tmp_path, name, file
):
    with pytest.raises(ChecksFailedError) as caught:
        interpreter.find(layouts(name), engine)
    assert f"--entrypoint sha256sum IMAGE {file}" in str(caught.value)
    digest = str(caught.value).rpartition(" ")[2]

    result = run(engine, layouts(name), tmp_path, digest)
    assert outcomes(result) == PASSED
    assert result.interpreter
    assert (result.interpreter.file, result.interpreter.package) == (file, None)
    assert result.interpreter.sha256 == digest
    (start,) = (check for check in result.checks if check.id == START)
    files = str(start.metrics[0].conditions["files"])
    assert ("/opt/uvenv/lib/python3.11/site-packages/_virtualenv.pth" in files) == (name == "uv")


def test_an_image_is_certified_whole_published_verified_and_run(engine, layouts, user, request):
    """What docs/guides/foreign-images.md says: every check of the tier runs, in 80 s of processor time."""
    reference = layouts("python")
    tag = label(reference)
    refused = user("certify", reference, code=6)
    digest = refused.stderr.rpartition(" ")[2].strip()

    certified = user("certify", reference, "--accept-python", digest, "--json")
    assert json.loads(certified.stdout)["verdict"] == "PASSED"
    assert "not needed" not in certified.stderr
    published = json.loads(user("publish", reference, "--to", "oci:certified", "--json").stdout)
    name = published["reference"]
    assert name == f"oci:certified:{tag}"

    verified = json.loads(user("verify", name, "--json").stdout)
    assert (verified["stack"], verified["digest"]) == (None, json.loads(certified.stdout)["digest"])
    assert verified["digest"] == published["digest"]
    assert digest in user("verify", name).stderr
    assert "belongs to no package" in user("verify", name, "--packaged-python", code=7).stderr
    assert tag in user("find", "oci:certified").stdout
    pulled = json.loads(user("pull", name, "--json").stdout)["image"]
    request.addfinalizer(lambda: engine.remove(pulled))
    ran = user("run", name, "--", "python3", "-c", "import os, torch; print(torch.__version__, os.getcwd())")
    assert ran.stdout.splitlines()[-1] == "2.13.0+cpu /workspace"


def test_an_image_with_torch_for_another_python_is_refused_before_the_suites_run(engine, layouts, tmp_path):
    """As with an environment of conda that PATH does not name; here Debian's Python comes first."""
    (tmp_path / "Dockerfile").write_text(f"FROM {layouts('python')}\nENV PATH=/usr/bin\n")
    other = NAME.format("other")
    target = {"context": str(tmp_path), "tags": [other]}
    buildx.bake({"target": {"other": target}}, ["other"], report=small_stacks.silent)
    try:
        assert interpreter.find(other, engine).package
        with pytest.raises(ChecksFailedError, match="does not find the installed torch and numpy"):
            needed.require(
                {"components": [{"name": name, "purl": f"pkg:pypi/{name}@1"} for name in needed.NEEDED]},
                subject_of(other, tmp_path),
                engine,
            )
    finally:
        engine.remove(other)


def test_an_image_that_cannot_be_had_is_one_sentence(engine):
    with pytest.raises(EngineError, match="does not have this image and cannot pull it") as caught:
        build.bring("localhost:1/rocm/pytroch:latest", engine, small_stacks.silent)
    assert "look at the spelling" in str(caught.value)


def test_the_packages_of_an_image_are_read_in_its_own_python(engine, layouts):
    """The SBOM finds torch also where a link leads to it."""
    found = interpreter.find(layouts("rocm"), engine)
    records = sbom.list_packages(layouts("rocm"), found, engine)
    heads = [record["head"].splitlines() for record in records if record["kind"] == "python"]
    assert any("Name: torch" in lines for lines in heads)
    assert not any("Name: pytest" in lines for lines in heads)
