"""What `run --print slurm|kubernetes` prints, by a real Slurm and by the schemas of Kubernetes.

Slurm starts the batch script on two nodes with its own srun and scontrol. Apptainer is in no package index of
these tests, so a program of that name notes the words that it was given.
"""

import subprocess
from pathlib import Path
from typing import Any

import pytest

import small_slurm
from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.engine.launch_lines import LaunchedJob

pytestmark = [pytest.mark.integration, pytest.mark.slow]

IMAGE = "registry.example.org/team/stacks@sha256:" + "a" * 64
COMMAND = ("torchrun", "train.py", "--name", "it's $HOME")
KUBERNETES = "1.33"


def job(vendor: Any, nodes: int) -> LaunchedJob:
    words = vendors.module(vendor).launch_words()
    return LaunchedJob(
        image=IMAGE, command=COMMAND, words=words, devices=8, nodes=nodes, certified_for="H200 x8"
    )


def test_a_real_slurm_gives_each_node_its_rank_and_the_name_of_the_first(
    slurm_programs: None,  # noqa: ARG001  # they have to be there
    tmp_path: Path,
) -> None:
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words.$SLURMD_NODENAME\n')
    program.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(launch_lines.render("slurm", job("cpu", 2)))
    with small_slurm.running() as cluster:
        env = cluster.env | {"PATH": f"{program.parent}:{cluster.env['PATH']}"}
        done = subprocess.run(
            ["sbatch", "--wait", f"--output={tmp_path}/log", script],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=tmp_path,
        )
        log = tmp_path / "log"
        assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    for rank, node in enumerate(("node1", "node2")):
        words = (tmp_path / f"words.{node}").read_text().splitlines()
        assert {f"--env=PET_NODE_RANK={rank}", "--env=PET_MASTER_ADDR=node1", "--env=PET_NNODES=2"} <= {
            *words
        }
        assert words[-len(COMMAND) - 1 :] == [f"docker://{IMAGE}", *COMMAND]


def test_the_schemas_of_kubernetes_accept_the_printed_manifests(validators: Path, tmp_path: Path) -> None:
    paths = []
    for vendor in ("cpu", "amd", "nvidia"):
        for nodes in (1, 4):
            paths.append(tmp_path / f"{vendor}-{nodes}.yaml")
            paths[-1].write_text(launch_lines.render("kubernetes", job(vendor, nodes)))
    program = [validators / "kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES]
    done = subprocess.run([*program, *paths], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    paths[-1].write_text(paths[-1].read_text().replace("backoffLimit", "backofLimit"))
    assert subprocess.run([*program, paths[-1]], capture_output=True, check=False).returncode != 0
