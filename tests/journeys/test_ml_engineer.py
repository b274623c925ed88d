"""An ML engineer: find a certified image, verify it, train in it, be preempted, and go on."""

from __future__ import annotations

import datetime as dt
import subprocess
import uuid
from typing import TYPE_CHECKING, Any

import pytest

import shell_image
from small_images import STACK_ID, SmallImage, certify, new_key, quiet
from stackcheck.certificate import keyring, keys, publish
from stackcheck.engine.client import Engine
from stackcheck.oci.layout import OciLayout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Journey

pytestmark = pytest.mark.slow
PROGRAMS = ("bash", "sleep", "cat")
HOST = "--device-model CPU --driver none --key publisher.pub"
# Counts from its checkpoint on; a signal makes it write one and exit with 1, as the trainers do.
TRAINER = """\
step=0; [ -e checkpoint ] && read step < checkpoint && echo "resumed from a checkpoint"
trap 'echo $step > checkpoint; echo "wrote a checkpoint"; exit 1' TERM
[ "$step" -gt 0 ] && exit 0
echo started > started
while :; do step=$((step + 1)); sleep 0.1; done
"""


@pytest.fixture
def reference(registry: str, journey: Journey, tmp_path) -> Iterator[str]:
    """A certified image in the registry; the user has the publisher's public key, and a training script."""
    key = new_key()
    files = {"/unique": uuid.uuid4().bytes}
    shell_image.make_layout(tmp_path / "oci", programs=PROGRAMS, files=files)
    manifest = OciLayout(tmp_path / "oci").only_manifest()
    (config,) = manifest.descriptors("config")
    image = SmallImage(tmp_path / "oci", manifest.digest, config.digest)
    told: dict[str, Any] = {"public_key": key.public_key(), "report": quiet, "key": key}
    envelopes = certify(image, key, now=dt.datetime.now(dt.UTC))
    target = f"{registry}/team/stacks"
    publish.publish(image.layout, tag=STACK_ID, envelopes=envelopes, target=target, **told)
    (journey.folder / "publisher.pub").write_bytes(keys.public_pem(key.public_key()))
    (journey.folder / "train.sh").write_text(TRAINER)
    name = f"{config.digest[7:19]}"
    journey.hidden |= {keyring.hint(key.public_key()): "<key>", name: "<image>", registry: "<registry>"}
    yield f"{target}:{STACK_ID}"
    engine = Engine.connect()
    if engine.has(f"stackcheck/{STACK_ID}:{name}"):
        engine.remove(f"stackcheck/{STACK_ID}:{name}")


def test_the_terminal_of_an_ml_engineer(journey, reference):
    target = reference.rpartition(":")[0]
    journey.types(f"stackcheck find {target} --device-model CPU --key publisher.pub")
    journey.types(f"stackcheck verify {reference} {HOST}")
    journey.types(
        f"stackcheck verify {reference} --device-model H200 --driver 580.1 --key publisher.pub", code=7
    )
    run = f"stackcheck -q run {reference} {HOST}"
    journey.types(f"{run} -- bash -c 'echo out; exit 7'", code=7)
    journey.types(f"{run} -- no-such-program", code=127)
    # A preemption: the signal goes to `run` alone, as Slurm and Kubernetes send it to what they started.
    journey.types(
        f"{run} -- bash train.sh & job=$!; until [ -e started ]; do sleep 0.1; done; sleep 1; "
        "kill -TERM $job; wait $job",
        code=1,
    )
    assert int((journey.folder / "checkpoint").read_text()) > 0
    journey.types(f"{run} -- bash train.sh")
    for form in ("docker", "pyxis", "kubernetes"):
        journey.types(f"{run} --print {form} --name mine -- bash train.sh")
    journey.is_as_in("ml_engineer.txt")


def test_nothing_of_it_stays(journey, reference):
    """A container of a job that was preempted is gone when `run` ends."""
    journey.types(
        f"stackcheck -q run {reference} {HOST} -- bash train.sh & job=$!; "
        "until [ -e started ]; do sleep 0.1; done; kill -TERM $job; wait $job",
        code=1,
    )
    left = subprocess.run(["docker", "ps", "-aq"], capture_output=True, text=True, check=True).stdout.split()
    mounts = [
        subprocess.run(
            ["docker", "inspect", "-f", "{{json .Mounts}}", one], capture_output=True, text=True, check=False
        ).stdout
        for one in left
    ]
    assert not [text for text in mounts if str(journey.folder) in text]
