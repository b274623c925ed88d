"""A build without a network: the wheels of one folder suffice, or the missing one is named."""

import dataclasses
import json
import re
import secrets
import shutil
import subprocess
import sys

import pytest

from small_recipe import render_from
from small_stacks import ASSETS, ROOT, build_one
from small_wheels import locked_line, make_wheel
from stackcheck.errors import BuildError
from stackcheck.matrix.stack import Stack
from stackcheck.oci.image_layout import ImageLayout

pytestmark = [pytest.mark.integration, pytest.mark.slow]

NAME = "small_package-1.0-py3-none-any.whl"


@pytest.fixture
def stack(tmp_path, cpu_stack: Stack, monkeypatch) -> Stack:
    """A stack of one package, on the real base, on a host whose pip knows only an index that is not there."""
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.invalid/simple")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    word = secrets.token_hex(8)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "bases").symlink_to(ROOT / "build" / "bases")
    wheel = make_wheel(tmp_path / "wheels", word=word)
    made = dataclasses.replace(cpu_stack, id=f"airgapped-{word}")
    text = (ASSETS / "airgapped.Dockerfile").read_text().replace("@NONCE@", word)
    folder = render_from(text, made, tmp_path)
    (folder / "requirements.lock").write_text(locked_line(wheel))
    return made


def test_a_folder_of_wheels_suffices_where_nothing_else_can_be_reached(
    stack,
    engine,  # its set-up has made the host ready
    tmp_path,
):
    image = build_one(stack, engine, tmp_path, wheelhouse=tmp_path / "wheels")
    assert [use.name for use in image.stages] == ["base", "wheels", "final"]
    config = ImageLayout(image.layout).json(image.config_digest)
    assert "network" not in json.dumps(config["history"])  # the image is the one that a network would give
    engine.remove(image.reference)


def test_a_missing_wheel_is_named_before_the_build_with_a_command_that_fetches_it(
    stack,
    engine,  # its set-up has made the host ready
    tmp_path,
):
    (tmp_path / "wheels" / NAME).rename(tmp_path / NAME)
    with pytest.raises(BuildError, match="lacks 1 of 1 packages for linux/") as caught:
        build_one(stack, engine, tmp_path, wheelhouse=tmp_path / "wheels")
    assert "small-package==1.0" in str(caught.value.got)
    command = str(caught.value.next_step).partition(": ")[2]
    assert command.startswith("pip download ")
    assert re.search(rf"-r images/{stack.id}/requirements.lock$", command)
    # As typed, on a machine whose index has it (here a folder): the shell writes out the braces.
    there = command.replace("pip download", f"{sys.executable} -m pip download --no-index --find-links .")
    there = re.sub(r"--extra-index-url=\S+", "", there)
    subprocess.run(["bash", "-c", there], cwd=tmp_path, check=True, capture_output=True, timeout=300)
    assert (tmp_path / "wheels" / NAME).exists()


def test_a_wheel_of_another_content_is_as_good_as_none(
    stack,
    engine,  # its set-up has made the host ready
    tmp_path,
):
    shutil.copy(make_wheel(tmp_path, word="another word"), tmp_path / "wheels" / NAME)
    with pytest.raises(BuildError, match="lacks 1 of 1"):
        build_one(stack, engine, tmp_path, wheelhouse=tmp_path / "wheels")
