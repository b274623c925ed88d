"""An engine that has nothing gets the certified image from where it was published, and runs it."""

import datetime as dt
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

import shell_image
from scripted import ROOT
from second_daemon import second_daemon
from small_images import STACK_ID, SmallImage, new_key, quiet, release
from stackcheck.certificate import keys
from stackcheck.engine import host_setup
from stackcheck.engine.client import Engine
from stackcheck.oci.image_layout import ImageLayout
from waits import run_program

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start a second daemon"),
]

KEY = new_key()


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> SmallImage:
    layout = tmp_path_factory.mktemp("image") / "oci"
    digest = shell_image.make_layout(layout)
    return SmallImage(layout, digest, ImageLayout(layout).json(digest)["config"]["digest"])


def stackcheck(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A consumer's command, with the publisher's public key and no other file of the publisher."""
    verb, reference, *rest = arguments
    (folder / "stackcheck.pub").write_bytes(keys.public_pem(KEY.public_key()))
    options = ["--key", str(folder / "stackcheck.pub"), "--device-model", "CPU", "--driver", "none"]
    return run_program(
        [sys.executable, "-m", "stackcheck", verb, reference, *options, *rest],
        timeout=300,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XDG_CONFIG_HOME": str(folder / "config")},
    )


@pytest.mark.parametrize(("store", "containerd_store"), [("layout", True), ("registry", False)])
def test_an_empty_engine_pulls_what_was_certified_and_runs_it(
    request, image, tmp_path, store, containerd_store
):
    host_setup.ensure_engine(quiet)
    target = f"oci:{tmp_path / 'dist'}"
    if store == "registry":
        target = f"{request.getfixturevalue('registry')}/stacks/{uuid.uuid4().hex}"
    release(image, target, KEY, now=dt.datetime.now(dt.UTC))
    (tmp_path / "work").mkdir()
    reference = f"{target}:{STACK_ID}"
    with second_daemon(containerd_store=containerd_store):
        engine = Engine.connect()
        assert engine.containerd_store == containerd_store
        assert engine._client.images.list(all=True) == []
        pulled = stackcheck(tmp_path / "work", "pull", reference)
        assert pulled.returncode == 0, pulled.stderr
        (name,) = (line.split()[1] for line in pulled.stdout.splitlines() if line.startswith("image"))
        assert engine.inspect(name).id in {image.manifest_digest, image.config_digest}
        script = "echo it runs; echo written > made"
        done = stackcheck(tmp_path / "work", "run", reference, "--", "/bin/bash", "-c", script)
        assert (done.returncode, done.stdout) == (0, "it runs\n"), done.stderr
        assert "is in the engine already" in done.stderr
        assert (tmp_path / "work" / "made").read_text() == "written\n"
        assert engine._client.containers.list(all=True) == []
