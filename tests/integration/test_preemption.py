"""A training that is stopped writes a checkpoint, and the same command continues it.

The certified cpu stack and this project's trainer: `stackcheck run` in jobs of a real Slurm, which has no
Apptainer here; and the pod that `run --print kubernetes` prints, as Docker starts and stops it.
"""

import datetime as dt
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import registry_process
import scripted
import small_slurm
from small_images import SmallImage, certify, new_key, quiet
from small_slurm import Cluster
from stackcheck.certificate import keys, publish
from stackcheck.engine.client import Engine
from stackcheck.matrix.stack import Stack
from stackcheck.oci import tags
from stackcheck.oci.layout import OciLayout

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]
# More steps than any machine takes before the signal; without the signal there is no checkpoint.
ENDLESS = "trainers/train.py --steps 1000000 --log-every 1 --checkpoint kept --checkpoint-every"
ALONE = f"python3 {ENDLESS} 1000000"
# torchrun itself ends with 1; on a busy machine it may abort while its Python ends, after the ranks did
# ("terminate called without an active exception"), which a shell calls 134.
ENDS = {1, 134}
RANKS = f"torchrun --standalone --nproc-per-node 2 {ENDLESS} 1000000"
OFTEN = f"python3 {ENDLESS} 2"
GRACE_S = 120  # a busy machine writes slowly; terminationGracePeriodSeconds of docs/guides


class Training:
    """A folder of a user with the trainer, and the lines that start it in the certified image."""

    def __init__(self, folder: Path, reference: str, public: Path) -> None:
        self.folder, self.reference = folder, reference
        self.host = f"--device-model CPU --driver none --key {public}"
        shutil.copytree(scripted.ROOT / "trainers", folder / "trainers")

    def line(self, command: str, *options: str) -> str:
        return f"{self.verb('run', *options)} -- {command}"

    def verb(self, verb: str, *options: str) -> str:
        program = f"env PYTHONPATH={scripted.ROOT} {sys.executable} -m stackcheck -q"
        return f"{program} {verb} {self.reference} {self.host} {' '.join(options)}"

    def checkpoints(self) -> list[int]:
        """The steps of the complete ones."""
        return sorted(int(path.parent.name[5:]) for path in self.folder.glob("kept/step_*/COMPLETE"))


def trains(said: str) -> bool:
    """Some steps are done since the last start."""
    return len(re.findall(r"^.*\bstep +\d+", said.rpartition("resumed from")[2], re.MULTILINE)) > 3


def said_by(line: str) -> str:
    return subprocess.run(shlex.split(line), capture_output=True, text=True, check=True).stdout


def record_of(said: str) -> dict[str, Any]:
    (line,) = (line for line in said.splitlines() if line.startswith('{"'))
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.fixture(scope="module")
def published(
    engine: Engine, cpu_stack: Stack, registry_program: Path, tmp_path_factory
) -> Iterator[tuple[str, Path]]:
    """The cpu stack, built if it is not, in a registry under a certificate; and the public key."""
    folder, key = tmp_path_factory.mktemp("published"), new_key()
    code, text = scripted.stackcheck(scripted.ROOT, "build", cpu_stack.id, "--root", str(scripted.ROOT))
    assert code == 0, text
    layout = scripted.ROOT / "build" / cpu_stack.id / "oci"
    manifest = OciLayout(layout).only_manifest()
    (config,) = manifest.descriptors("config")
    image = SmallImage(layout, manifest.digest, config.digest)
    envelopes = certify(image, key, now=dt.datetime.now(dt.UTC))
    (folder / "publisher.pub").write_bytes(keys.public_pem(key.public_key()))
    name = tags.local_name(cpu_stack.id, config.digest)
    was_there = engine.has(name)
    with registry_process.running(registry_program, folder / "registry") as port:
        target = f"127.0.0.1:{port}/stacks"
        told: dict[str, Any] = {"public_key": key.public_key(), "report": quiet, "key": key}
        publish.publish(layout, tag=cpu_stack.id, envelopes=envelopes, target=target, **told)
        yield f"{target}:{cpu_stack.id}", folder / "publisher.pub"
    if not was_there and engine.has(name):
        engine.remove(name)


@pytest.fixture
def training(published: tuple[str, Path], tmp_path) -> Training:
    return Training(tmp_path, *published)


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[Cluster]:  # noqa: ARG001  # they have to be there
    with small_slurm.running() as found:
        yield found


class Batch:
    """A batch script that ends with `srun` and the training's line, and notes the line's exit code."""

    def __init__(self, cluster: Cluster, training: Training, command: str, *options: str) -> None:
        self.cluster, self.said, self.codes = cluster, training.folder / "said", training.folder / "codes"
        self.before = len(self.text())  # an earlier job of this folder wrote into the same file
        script = training.folder / "job.sh"
        # The step's shell passes no signal on, so it becomes the program; the batch shell notes the code.
        lines = ["#!/bin/bash", f"#SBATCH --output={self.said} --open-mode=append"]
        lines += [f"#SBATCH {option}" for option in options]
        lines += ["trap : TERM", f"srun {training.line(command)} & wait $!", "code=$?"]
        lines += ["wait $! || code=$?", f"echo $code >> {self.codes}"]
        script.write_text("\n".join(lines) + "\n")
        sent = cluster.client("sbatch", "--parsable", f"--chdir={training.folder}", str(script))
        self.id = sent.strip()

    def text(self) -> str:
        return self.said.read_text() if self.said.exists() else ""

    def wait_until_it_trains(self) -> None:
        small_slurm.wait(lambda: trains(self.text()[self.before :]), f"steps\n{self.text()}", self.cluster)

    def wait_for_its_end(self) -> None:
        small_slurm.wait(
            lambda: not self.cluster.jobs(f"--jobs={self.id}"), "the end of the job", self.cluster
        )


def test_a_job_that_slurm_requeues_writes_a_checkpoint_and_continues(cluster, training):
    """`scontrol requeue` is what a preemption with PreemptMode=REQUEUE does."""
    job = Batch(cluster, training, ALONE, "--requeue")
    job.wait_until_it_trains()
    assert training.checkpoints() == []
    cluster.client("scontrol", "requeue", job.id)
    small_slurm.wait(lambda: "resumed from step" in job.text(), "the second start", cluster)
    (first,) = training.checkpoints()
    assert first > 0
    assert f"resumed from step {first} " in job.text()
    job.wait_until_it_trains()
    cluster.client("scancel", job.id)
    job.wait_for_its_end()
    assert training.checkpoints()[-1] > first


def test_a_step_that_gets_the_signal_of_the_time_limit_ends_with_the_trainer_s_code(cluster, training):
    """`#SBATCH --signal=TERM@…` of docs/guides, which goes to the steps alone."""
    limit = ("--time=60", "--signal=TERM@60")
    steps: list[int] = []
    for start in (1, 2):
        begun = time.monotonic()
        job = Batch(cluster, training, RANKS, *limit)
        job.wait_until_it_trains()  # however long that takes, the signal comes after it, within a minute
        minutes = int((time.monotonic() - begun) / 60) + 2
        cluster.client("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}")
        job.wait_for_its_end()
        records = [json.loads(line) for line in job.text().splitlines() if line.startswith('{"')]
        assert len(records) == start, job.text()
        assert records[-1]["stopped"] is True
        assert records[-1]["first_step"] == (steps[-1] if steps else 0)
        codes = [int(word) for word in job.codes.read_text().split()]
        assert len(codes) == start, codes
        assert {*codes} <= ENDS, job.text()
        steps = training.checkpoints()
    assert steps[-1] > records[-1]["first_step"] > 0


@pytest.mark.parametrize("whole_group", [True, False], ids=["the whole group", "run alone"])
def test_a_signal_to_run_writes_a_checkpoint_from_which_the_same_line_continues(training, *, whole_group):
    """A scheduler signals each process of a step, so that `run` and a shell around it both get one."""
    last = 0
    for _start in range(2):
        with (training.folder / "said").open("w") as said:
            line = f"trap : TERM; {training.line(ALONE)} & echo $! > pid; wait $!; wait $!"
            job = subprocess.Popen(
                ["bash", "-c", line], stdout=said, stderr=said, cwd=training.folder, start_new_session=True
            )
        small_slurm.wait(lambda: trains((training.folder / "said").read_text()), "steps of the job")
        if whole_group:
            os.killpg(job.pid, signal.SIGTERM)
        else:
            os.kill(int((training.folder / "pid").read_text()), signal.SIGTERM)
        assert job.wait(small_slurm.TIMEOUT_S) == 1
        told = record_of((training.folder / "said").read_text())
        assert (told["stopped"], told["first_step"]) == (True, last)
        last = training.checkpoints()[-1]
        assert last > told["first_step"]


class Pod:
    """The container of the printed Job, as a kubelet starts it: its command is the first process."""

    def __init__(self, training: Training, command: str) -> None:
        self.training, self.name = training, f"preempted-{os.getpid()}"
        manifest = said_by(training.line(command, "--print", "kubernetes"))
        self.spec = yaml.safe_load(manifest)["spec"]["template"]["spec"]
        # The engine has it under this name, so that it fetches nothing from the registry.
        self.image = json.loads(said_by(training.verb("pull", "--json")))["image"]

    def docker(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["docker", *words], capture_output=True, text=True, check=False, timeout=600)

    def start(self) -> None:
        (one,) = self.spec["containers"]
        user, rights = self.spec["securityContext"], one["securityContext"]
        assert rights["readOnlyRootFilesystem"]
        assert rights["capabilities"] == {"drop": ["ALL"]}
        assert {mount["mountPath"] for mount in one["volumeMounts"]} == {"/workspace", "/tmp", "/dev/shm"}
        options = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--shm-size=1g"]
        options += [f"--user={user['runAsUser']}:{user['runAsGroup']}", "--tmpfs=/tmp:rw,exec,mode=1777"]
        options += [f"--volume={self.training.folder}:/workspace", f"--workdir={one['workingDir']}"]
        options += [f"--env={each['name']}={each['value']}" for each in one["env"]]
        options += [f"--entrypoint={one['command'][0]}", self.image, *one["command"][1:]]
        self.docker("rm", "--force", self.name)
        started = self.docker("run", "--detach", f"--name={self.name}", *options)
        assert started.returncode == 0, started.stderr

    def said(self) -> str:
        shown = self.docker("logs", self.name)
        return shown.stdout + shown.stderr

    def wait_until_it_trains(self) -> None:
        small_slurm.wait(lambda: trains(self.said()), "steps of the pod")

    def stop(self, grace_s: int) -> int:
        """SIGTERM, and SIGKILL after the grace period; the exit code."""
        assert self.docker("stop", f"--time={grace_s}", self.name).returncode == 0
        return int(self.docker("inspect", "--format={{.State.ExitCode}}", self.name).stdout)


@pytest.fixture
def own_folder(training: Training) -> Iterator[Training]:
    """The claim of the pod belongs to the user that the manifest names."""
    for path in (training.folder, *training.folder.rglob("*")):
        os.chown(path, 1000, 1000)
    for above in training.folder.parents:
        if above == Path(tempfile.gettempdir()):
            break
        above.chmod(0o755)
    yield training
    subprocess.run(["docker", "rm", "--force", f"preempted-{os.getpid()}"], capture_output=True, check=False)


@pytest.mark.parametrize("command", [ALONE, RANKS], ids=["python", "torchrun"])
def test_a_pod_that_is_stopped_writes_a_checkpoint_in_its_grace_period_and_continues(own_folder, command):
    pod = Pod(own_folder, command)
    last = 0
    for _start in range(2):
        pod.start()
        pod.wait_until_it_trains()
        assert own_folder.checkpoints()[-1:] == ([last] if last else [])
        assert pod.stop(GRACE_S) in (ENDS if command == RANKS else {1}), pod.said()
        told = record_of(pod.said())
        assert (told["stopped"], told["first_step"]) == (True, last)
        assert own_folder.checkpoints()[-1] > last
        last = own_folder.checkpoints()[-1]


def test_a_pod_without_a_grace_period_continues_from_the_last_complete_checkpoint(own_folder):
    pod = Pod(own_folder, OFTEN)
    pod.start()
    small_slurm.wait(lambda: len(own_folder.checkpoints()) > 1, "two checkpoints")
    assert pod.stop(0) in {1, 137}
    newest = own_folder.checkpoints()[-1]
    pod.start()
    pod.wait_until_it_trains()
    assert f"resumed from step {newest} " in pod.said()
