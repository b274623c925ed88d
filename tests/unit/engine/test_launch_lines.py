"""What `run --print` prints: no more rights than `run` has, and the host's network only for several nodes."""

import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.engine.launch_lines import FORMS, LaunchedJob
from stackcheck.errors import ConfigurationError

IMAGE = "registry.example.org/team/stacks@sha256:" + "a" * 64
COMMAND = ("torchrun", "train.py", "--name", "it's $HOME; rm -rf /")
TOGETHER = ("--network=host", "--ulimit=memlock=-1", "/dev/infiniband", "hostNetwork: true", "IPC_LOCK")


def job(vendor: Any = "nvidia", **changes: Any) -> LaunchedJob:
    words = vendors.module(vendor).launch_words()
    given = {"image": IMAGE, "command": COMMAND, "words": words, "devices": 8, "certified_for": "H200 x8"}
    return LaunchedJob(**(given | changes))


def printed_words(line: str, folder: Path) -> list[str]:
    """The words that a shell makes of a line, with the program replaced."""
    program = folder / "bin" / shlex.split(line, comments=True)[0]
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    program.chmod(0o755)
    env = {"PATH": f"{program.parent}:/usr/bin:/bin", "NODE_RANK": "1", "MASTER_ADDR": "node0"}
    done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, check=True, env=env)
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "cpu"])
@pytest.mark.parametrize("form", ["docker", "podman", "apptainer"])
def test_a_shell_reads_the_command_as_it_was_given(tmp_path, form, vendor):
    for nodes in (1, 2):
        words = printed_words(launch_lines.render(form, job(vendor, nodes=nodes)), tmp_path)
        assert tuple(words[-len(COMMAND) :]) == COMMAND
        assert words[-len(COMMAND) - 1].removeprefix("docker://") == IMAGE
        ranks = [word for word in words if word.startswith("--env=PET_NODE_RANK")]
        assert ranks == (["--env=PET_NODE_RANK=1"] if nodes > 1 else [])


@pytest.mark.parametrize("form", FORMS)
def test_only_several_nodes_get_the_hosts_network_infiniband_and_pinned_memory(form):
    alone, many = launch_lines.render(form, job()), launch_lines.render(form, job(nodes=2))
    assert not [word for word in TOGETHER if word in alone]
    assert [word for word in TOGETHER if word in many]
    assert "privileged" not in (alone + many).lower()
    assert "H200 x8" in alone
    if form in {"docker", "podman"}:
        assert "--network=none" in alone
        for word in ("--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only"):
            assert word in alone
            assert word in many


def test_the_certified_libraries_of_an_image_are_not_covered_by_the_hosts():
    assert "--rocm" not in launch_lines.render("apptainer", job("amd"))


def test_a_batch_script_is_a_shell_script_whose_tasks_know_their_rank(tmp_path):
    script = launch_lines.render("slurm", job(nodes=2))
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "gpus" not in launch_lines.render("slurm", job("cpu"))
    for name, body in (("srun", 'shift; exec "$@"'), ("scontrol", "echo node0; echo node1")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
    (tmp_path / "apptainer").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node[0-1]"}
    script = script.replace("ulimit -l unlimited", "true")  # not every machine of a test may raise it
    done = subprocess.run(["sh", "-e"], input=script, capture_output=True, text=True, check=True, env=env)
    words = done.stdout.splitlines()
    assert "--env=PET_NODE_RANK=1" in words
    assert "--env=PET_MASTER_ADDR=node0" in words
    assert tuple(words[-len(COMMAND) :]) == COMMAND


def test_a_script_for_pyxis_starts_the_same_command_with_its_rank(tmp_path):
    script = launch_lines.render("pyxis", job(nodes=2, name="llama-8b"))
    assert "#SBATCH --job-name=llama-8b\n" in script
    assert f"--container-image='docker://registry.example.org#{IMAGE.partition('/')[2]}'" in script
    step = 'while [ "$1" != sh ]; do shift; done; exec "$@"'
    for name, body in (("srun", step), ("scontrol", "echo node0"), ("torchrun", 'env; printf "%s\\n" "$@"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_NODEID": "1", "SLURM_JOB_NODELIST": "node[0-1]"}
    script = script.replace("ulimit -l unlimited", "true")
    done = subprocess.run(["sh", "-e"], input=script, capture_output=True, text=True, check=True, env=env)
    words = done.stdout.splitlines()
    assert {"PET_NODE_RANK=1", "PET_MASTER_ADDR=node0", "PET_NNODES=2"} <= {*words}
    assert tuple(words[-len(COMMAND) + 1 :]) == COMMAND[1:]


@pytest.mark.parametrize("vendor", ["amd", "nvidia", "cpu"])
def test_a_pod_on_one_node_is_what_the_restricted_level_asks_for(vendor):
    """As kubernetes.io/docs/concepts/security/pod-security-standards has it."""
    (document,) = yaml.safe_load_all(launch_lines.render("kubernetes", job(vendor, name="mine")))
    assert document["metadata"]["name"] == "mine"
    pod = document["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    allowed = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    assert all((volume.keys() - {"name"}) <= allowed for volume in pod["volumes"])
    assert container["resources"]["requests"].keys() == {"cpu", "memory"}


def test_a_manifest_asks_for_the_devices_and_gives_each_pod_its_rank():
    (alone,) = yaml.safe_load_all(launch_lines.render("kubernetes", job("amd")))
    pod = alone["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == IMAGE
    assert tuple(container["command"]) == COMMAND
    assert container["resources"]["limits"] == {"amd.com/gpu": 8}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    service, many = yaml.safe_load_all(launch_lines.render("kubernetes", job(nodes=4)))
    assert many["spec"]["completions"] == many["spec"]["parallelism"] == 4
    assert many["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    env = {item["name"]: item for item in many["spec"]["template"]["spec"]["containers"][0]["env"]}
    assert env["PET_MASTER_ADDR"]["value"] == f"{many['metadata']['name']}-0.{service['metadata']['name']}"
    assert "job-completion-index" in str(env["PET_NODE_RANK"]["valueFrom"])


@pytest.mark.parametrize("form", ["slurm", "pyxis", "kubernetes"])
def test_other_nodes_cannot_fetch_an_image_that_is_in_no_registry(form):
    with pytest.raises(ConfigurationError, match="in a registry"):
        launch_lines.render(form, job(image="stackcheck/x:1", in_registry=False))
