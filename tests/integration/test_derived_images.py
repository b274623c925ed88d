"""Images made FROM a certified one, on a real daemon: what runs again, what is taken over, what is refused.

One goes the whole way by the command line: certified with few checks, published, verified, run, and refused
when the image below is revoked. The others are looked at only: each lets every check run, or is refused.
"""

import base64
import hashlib
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import small_stacks
from stackcheck.engine.client import Engine
from stackcheck.errors import ConfigurationError
from stackcheck.imaging import build
from stackcheck.imaging.image import Image
from stackcheck.oci.tags import label
from stackcheck.suite import added

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NAME = "stackcheck-test/derived:{}"
SEEN = {
    "sitecustomize": "sitecustomize.py has a name that is imported already",
    "startup": "quiet.pth is read when Python starts",
    "preload": "its setting Env is another",
    "entrypoint": "its setting Entrypoint is another",
    "whiteout": "torch/version.py was changed or removed",
    "link": "torch/version.py was changed or removed",
    "loader": "/etc/ld.so.conf.d/app.conf is in a folder that programs look into",
    "package": "have the name einops",
}
BODY = b"VALUE = 42\n"
USER = "import os, quiet_package; print(quiet_package.VALUE, os.path.exists('/app/train.py'))"


@pytest.fixture(scope="module")
def made(engine: Engine, cpu_image: Image, tmp_path_factory) -> Iterator[Callable[[str], str]]:
    """The reference of an image of the Dockerfile; all are built at once."""
    context = tmp_path_factory.mktemp("derived")
    shutil.copy(small_stacks.ASSETS / "derived" / "Dockerfile", context)
    (context / "train.py").write_text("print('trained')\n")
    write_package(context)
    names = ("apart", "stranger", *SEEN)
    with small_stacks.built_images(engine, NAME, names, context, BELOW=cpu_image.reference) as references:
        yield references


def write_package(context: Path) -> None:
    """A package of one module as pip installs it, with its record."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(BODY).digest()).rstrip(b"=").decode()
    info = context / "quiet_package-1.0.dist-info"
    (context / "quiet_package").mkdir()
    info.mkdir()
    (context / "quiet_package" / "__init__.py").write_bytes(BODY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet-package\nVersion: 1.0\n")
    (info / "RECORD").write_text(
        f"quiet_package/__init__.py,sha256={digest},{len(BODY)}\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n"
    )


def look(reference: str, engine: Engine, below: Image, folder: Path) -> added.Added:
    """What an image adds to the one below, as `certify --derived-from` sees it."""
    image = build.adopt(reference, engine, folder=folder, report=small_stacks.silent)
    config = added.config_of(below.layout, below.manifest_digest)
    try:
        return added.look(image.layout, image.manifest_digest, config, small_stacks.ROOT)
    finally:
        shutil.rmtree(folder)  # a copy of a large image


@pytest.mark.parametrize("name", SEEN)
def test_what_a_check_may_see_lets_all_run(engine, made, cpu_image, tmp_path, name):
    found = look(made(name), engine, cpu_image, tmp_path / name)
    assert SEEN[name] in found.seen


def test_another_base_with_the_same_labels_is_refused(engine, made, cpu_image, tmp_path):
    with pytest.raises(ConfigurationError, match="was not made from this one"):
        look(made("stranger"), engine, cpu_image, tmp_path / "stranger")


def test_a_users_script_and_package_take_most_checks_over_until_the_image_below_is_revoked(
    engine, made, cpu_image, user, request
):
    """What docs/guides/train-in-a-certified-image.md says."""
    user("certify", cpu_image.reference)
    base = published(user, cpu_image.reference)
    digest = base.partition("@")[2]

    mine = made("apart")
    certified = user("certify", mine, "--derived-from", base, "--json")
    assert json.loads(certified.stdout)["verdict"] == "PASSED"
    assert "the others are taken over" in certified.stderr
    refused = user("publish", mine, "--to", "oci:elsewhere", code=8).stderr
    assert "the image below is not certified in this target" in refused
    name = published(user, mine)

    verified = json.loads(user("verify", name, "--json").stdout)
    taken = verified["derived_from"]
    assert taken["digest"] == digest
    assert taken["carried"] > taken["ran"] > 0
    assert taken["carried"] + taken["ran"] >= len(verified["certificate"]["required"])
    assert "did not run in this image" in user("verify", name).stderr
    assert label(mine) in user("find", "oci:certified").stdout
    pulled = json.loads(user("pull", name, "--json").stdout)["image"]
    request.addfinalizer(lambda: engine.remove(pulled))
    ran = user("run", name, "--", "python3", "-c", USER)
    assert ran.stdout.splitlines()[-1] == "42 True"

    user("revoke", f"oci:certified@{digest}", "--reason", "NaN")
    assert "the image below does not hold" in user("verify", name, code=7).stderr
    user("run", name, "--", "true", code=125)


def published(user: Callable[..., subprocess.CompletedProcess[str]], reference: str) -> str:
    """The published image by its digest."""
    done: dict[str, Any] = json.loads(user("publish", reference, "--to", "oci:certified", "--json").stdout)
    return f"oci:certified@{done['digest']}"
