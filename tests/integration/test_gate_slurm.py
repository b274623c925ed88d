"""`stackcheck gate` as the prolog of a real Slurm; what `run --print` prints, by Slurm and by schemas."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import result_files
import scripted
import small_slurm
from small_checkout import CHECKS
from small_slurm import Cluster
from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.engine.launch_lines import LaunchedJob
from stackcheck.nightly import gate_files
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

# As the Python with torch: it writes the answer that is prepared for its node.
PYTHON = """#!{python}
import datetime, json, os, pathlib, sys, uuid
folder = next((a.partition("=")[2] for a in sys.argv if a.startswith("--result-dir=")), None)
if folder:
    prepared = pathlib.Path({answers!r})
    own = prepared / (os.environ.get("SLURMD_NODENAME", "") + ".json")
    answer = json.loads((own if own.exists() else prepared / "fit.json").read_text())
    now = datetime.datetime.now(datetime.timezone.utc).isoformat()
    answer |= {{"run_id": uuid.uuid4().hex, "started": now, "finished": now}}
    (pathlib.Path(folder) / "result.json").write_text(json.dumps(answer))
"""
PORT = {"kind": "0x15b3:0x1021:InfiniBand:1", "state": "ACTIVE", "errors": {}, "pcie": {}}
WORDS = "mlx5_3/1 at 0000:43:00.0: state DOWN, physical Polling"


def answer(*, broken: bool) -> str:
    ports = {"mlx5_2/1": PORT, "mlx5_3/1": PORT | {"state": "DOWN" if broken else "ACTIVE"}}
    checks = [result_files.check(name, devices=[]) for name in CHECKS]
    if broken:
        found = [{"kind": "nic", "words": WORDS, "device": None}]
        evidence = {"before": {}, "after": {"nics": ports}}
        checks[0] |= {"outcome": "invalid", "reason": WORDS, "machine": found, "evidence": evidence}
    told = vendors.host("cpu")
    host = result_files.host() | {"devices": told.as_json()["devices"]}
    return json.dumps(result_files.result(*checks, tier="gate", image=None, stack_id=None, host=host))


@pytest.fixture(scope="module")
def prolog(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gate")
    root = scripted.make_checkout(folder / "checkout")
    program, python = folder / "stackcheck", folder / "python"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={scripted.ROOT} exec {sys.executable} -m stackcheck "$@"\n')
    python.write_text(PYTHON.format(python=sys.executable, answers=str(folder)))
    (folder / "fit.json").write_text(answer(broken=False))
    (folder / "node1.json").write_text(answer(broken=True))
    wanted = gate_files.GateSettings(
        root=root,
        vendor="cpu",
        python=str(python),
        state=folder / "state",
        drain="slurm",
        program=str(program),
        log=str(folder / "gate.log"),
    )
    made = gate_files.installation("slurm", wanted, folder)
    (path,) = made.files
    path.write_text(made.files[path])
    for script in (path, program, python):
        script.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def cluster(slurm_programs: None, prolog: Path) -> Iterator[Cluster]:  # noqa: ARG001  # they have to be there
    with small_slurm.running(f"Prolog={prolog}\nPrologFlags=Alloc") as found:
        prolog.write_text(
            prolog.read_text().replace("PATH=", f"export SLURM_CONF={found.env['SLURM_CONF']}\nPATH=", 1)
        )
        yield found


def test_a_job_lands_on_the_fit_node_and_the_other_is_drained(cluster, prolog):
    where = prolog.parent / "where"
    options = ("--exclude=node3,node4", "--requeue", f"--output={where}", "--parsable", "--chdir=/tmp")
    number = cluster.client("sbatch", *options, "--wrap=echo $SLURMD_NODENAME").strip()
    log = prolog.parent / "gate.log"
    small_slurm.wait(lambda: where.exists() and where.read_text().strip(), "the job's end", cluster)
    assert where.read_text().split()[-1] == "node2", log.read_text()
    reason = cluster.client("sinfo", "-R", "--noheader", "--format=%N %E")
    assert reason.startswith("node1 stackcheck gate: unfit: mlx5_3/1 at 0000:43:00.0: state DOWN"), reason
    assert cluster.states()["node1"] == "drained"
    assert cluster.states()["node2"] in {"idle", "completing", "allocated"}
    said = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"node"')]
    assert {one["node"]: one["state"] for one in said} == {"node1": "unfit", "node2": "fit"}
    (part,) = next(one for one in said if one["node"] == "node1")["parts"]
    assert (part["kind"], part["name"]) == ("nic", "mlx5_3/1 at 0000:43:00.0")
    assert number


IMAGE = "registry.example.org/team/stacks@sha256:" + "a" * 64
COMMAND = ("torchrun", "train.py", "--name", "it's $HOME")
KUBERNETES = "1.33"


def job(vendor: Any, nodes: int) -> LaunchedJob:
    words = vendors.module(vendor).launch_words()
    return LaunchedJob(
        image=IMAGE, command=COMMAND, words=words, devices=8, nodes=nodes, certified_for="H200 x8"
    )


def test_a_real_slurm_gives_each_node_its_rank_and_the_name_of_the_first(
    slurm_programs,  # noqa: ARG001  # they have to be there
    tmp_path,
):
    program = tmp_path / "bin" / "apptainer"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words.$SLURMD_NODENAME\n')
    program.chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(launch_lines.render("slurm", job("cpu", 2)))
    with small_slurm.running() as cluster:
        env = cluster.env | {"PATH": f"{program.parent}:{cluster.env['PATH']}"}
        done = run_program(["sbatch", "--wait", f"--output={tmp_path}/log", script], env=env, cwd=tmp_path)
        log = tmp_path / "log"
        assert done.returncode == 0, done.stderr + (log.read_text() if log.exists() else "")
    for rank, node in enumerate(("node1", "node2")):
        words = (tmp_path / f"words.{node}").read_text().splitlines()
        assert {f"--env=PET_NODE_RANK={rank}", "--env=PET_MASTER_ADDR=node1", "--env=PET_NNODES=2"} <= {
            *words
        }
        assert words[-len(COMMAND) - 1 :] == [f"docker://{IMAGE}", *COMMAND]


def test_the_schemas_of_kubernetes_accept_the_printed_manifests(validators, tmp_path):
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
