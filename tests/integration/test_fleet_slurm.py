"""`stackcheck fleet` on a real Slurm of four nodes: real jobs, and the ways in which nodes are lost.

The suites of most tests are `scripted`'s, which take no minutes; the last test runs checks of the cpu stack.
"""

import json
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import scripted
import small_slurm
from scripted import Command
from small_slurm import Cluster
from small_stacks import ROOT
from stackcheck.engine import leftovers
from stackcheck.engine.client import Engine
from stackcheck.history.history import open_history
from stackcheck.history.runs import Query
from stackcheck.oci.tags import label, local_name

REFERENCE = "stackcheck-test/suites:fleet"
pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.usefixtures("heard_signals")]


@pytest.fixture(scope="module")
def cluster(slurm_programs: None) -> Iterator[Cluster]:  # noqa: ARG001  # they have to be there
    with small_slurm.running() as found:
        yield found


@pytest.fixture(autouse=True)
def on_this_cluster(cluster: Cluster, monkeypatch) -> None:
    monkeypatch.setenv("SLURM_CONF", cluster.env["SLURM_CONF"])


@pytest.fixture(scope="module")
def scripted_image(tmp_path_factory, engine: Engine) -> Iterator[None]:
    """The image of `scripted` under a name of its own: tests of other processes count containers too."""
    folder = tmp_path_factory.mktemp("image")
    scripted.make_layout(folder / "oci")
    engine.load(folder / "oci", REFERENCE)
    yield
    engine.remove(REFERENCE)


@pytest.fixture(scope="module")
def checkout(
    tmp_path_factory,
    engine: Engine,
    scripted_image: None,  # noqa: ARG001  # it has to be there
) -> Iterator[Path]:
    """A checkout that has tested the scripted image, so that the image is in it."""
    root = scripted.make_checkout(tmp_path_factory.mktemp("fleet") / "checkout")
    scripted.stackcheck(root, "test", REFERENCE)
    let_pass(root)
    yield root
    of_last_run = json.loads((root / "build" / label(REFERENCE) / "run.json").read_text())["image"]
    of_nodes = local_name(None, of_last_run["config_digest"])
    if engine.has(of_nodes):
        engine.remove(of_nodes)


def let_pass(checkout: Path) -> None:
    scripted.let_pass(checkout, label(REFERENCE))


class Fleet(Command):
    """A `stackcheck fleet run` of the scripted image."""

    def __init__(self, checkout: Path, nodes: int, *options: str) -> None:
        where = ("--root", str(checkout), "--gpu-vendor", "cpu", "--json")
        super().__init__(checkout, "fleet", "run", REFERENCE, "--nodes", str(nodes), *where, *options)

    def result(self) -> tuple[int, Any, dict[str, Any]]:
        """Exit code, the document, and its nodes by name."""
        out, err = self.process.communicate(timeout=800)
        self.lines += [err]
        assert "Traceback" not in err, err
        assert out, self.text
        document = json.loads(out)
        return self.process.returncode, document, {node["node"]: node for node in document["nodes"]}


def containers() -> list[str]:
    asked = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={REFERENCE}"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()


def test_nodes_pass_alone_and_one_that_never_starts_has_failed(cluster, checkout):
    # Held until the node is paused: Slurm gives a job no node that it has missed for a while.
    run = Fleet(checkout, 4, "--drain", "--sbatch=--hold")
    assert run.until("PENDING"), run.text
    cluster.pause_node("node4")
    try:
        (number,) = {line.split(":")[0].split()[-1] for line in run.lines if "submitted" in line}
        cluster.client("scontrol", "release", number)
        code, document, nodes = run.result()
    finally:
        cluster.resume_node("node4")
    told = {name: node["status"] for name, node in nodes.items()}
    assert told == {"node1": "PASSED", "node2": "PASSED", "node3": "PASSED", "node4": "FAILED"}, run.text
    assert (code, document["status"], document["nodes"][0]["node"]) == (6, "FAILED", "node4")
    assert "never started" in nodes["node4"]["reasons"][0]
    assert {node["rack"] for node in nodes.values()} == {"rack1", "rack2"}
    assert "image verified" in run.text
    runs = open_history(checkout).runs(Query(limit=10))
    assert [run.status for run in runs].count("PASSED") == 3
    told, page = scripted.stackcheck(checkout, "report", "--format", "markdown")
    assert told == 0, page
    sys.stdout.write(page)  # the whole fleet's verdict, as the page has it
    assert "Is the whole fleet fit?" in page
    assert "on 4 nodes at" in page
    assert "**node4**: the node never started" in page
    assert scripted.stackcheck(checkout, "report")[0] == 0
    html = (checkout / "build" / "report.html").read_text(encoding="utf-8")
    assert "<strong>3 of 4 nodes</strong> passed alone" in html
    assert html.index("rack2, small: 1 of 2 nodes did not pass") < html.index(
        "rack1, small: 2 nodes, none bad"
    )
    assert "stackcheck" in cluster.client("sinfo", "-R", "--noheader", "--format=%E %N")  # drained, as asked
    cluster.client("scontrol", "update", "nodename=node4", "state=resume")
    cluster.wait_for("idle", *small_slurm.NODES)


def test_an_array_tests_each_node_once_as_soon_as_it_is_free(cluster, checkout):
    cluster.client("scontrol", "update", "nodename=node3", "state=drain", "reason=busy")
    try:
        run = Fleet(checkout, 3, "--array", "--exclude", "node4")
        assert run.until("2 of 3 nodes have ended"), run.text
        cluster.wait_for("idle", "node1", "node2")
        assert "PD" in cluster.jobs(), "no tested node is taken again"
    finally:
        cluster.client("scontrol", "update", "nodename=node3", "state=resume")
    code, _, nodes = run.result()
    told = {name: node["status"] for name, node in nodes.items()}
    assert (code, told) == (0, dict.fromkeys(("node1", "node2", "node3"), "PASSED")), run.text
    assert {node["rack"] for node in nodes.values()} == {"rack1", "rack2"}


def test_nodes_of_a_heterogeneous_job_find_one_meeting_point(cluster, tmp_path):
    code = "import os; from stackcheck.fleet.rendezvous import find; r = find(os.environ)"
    code += "; print(r.nodes, r.rank, r.address, os.environ['SLURMD_NODENAME'], flush=True)"
    script, alike = tmp_path / "het.sh", "--ntasks-per-node=1 --exclusive"
    srun = shlex.join(["srun", "--het-group=0,1", sys.executable, "-c", code])
    parts = [f"#SBATCH --nodes=2 {alike}", "#SBATCH hetjob", f"#SBATCH --nodes=1 {alike}"]
    script.write_text("\n".join(["#!/bin/sh", *parts, f"export PYTHONPATH={ROOT}", srun, ""]))
    cluster.client("sbatch", "--wait", f"--output={tmp_path}/out", str(script))
    told = sorted(line.split() for line in (tmp_path / "out").read_text().splitlines())
    nodes = [node for *_, node in told]
    assert told == [["3", str(rank), nodes[0], node] for rank, node in enumerate(nodes)]
    assert len(set(nodes)) == 3


def test_a_node_that_dies_and_a_task_that_hangs_do_not_hold_up_the_rest(cluster, checkout, engine):
    scripted.let_sleep(checkout)
    try:
        run = Fleet(checkout, 3, "--exclude", "node4")
        for _ in range(3):
            assert run.until("stackcheck: the suites run"), run.text
        (job,) = (
            path for path in (checkout / "build" / "fleet").iterdir() if not (path / "fleet.json").exists()
        )
        cluster.kill_node("node3", job)
        small_slurm.wait(lambda: cluster.states()["node3"].startswith("down"), "node3 down", cluster)
        for name in ("node1", "node2"):
            cluster.end_time_of(name, job)
        code, _, nodes = run.result()
    finally:
        let_pass(checkout)
    assert code == 6
    assert "down" in nodes["node3"]["reasons"][0], nodes["node3"]
    for name in ("node1", "node2"):
        assert "did not end in time" in nodes[name]["reasons"][0], nodes[name]
    # That of the node that lost its power is there until the next run on its machine, of whatever image.
    leftovers.sweep(engine._client)
    assert containers() == []
    cluster.start_node("node3")  # until then the job is COMPLETING there
    cluster.wait_for("idle", "node1", "node2", "node3")
    small_slurm.wait(lambda: not cluster.jobs(), "the end of all jobs", cluster)


def test_a_job_that_is_requeued_counts_only_with_its_last_attempt(cluster, checkout):
    run = Fleet(checkout, 2)
    assert run.until(": running"), run.text
    (number,) = {line.split(":")[0].split()[-1] for line in run.lines if "submitted" in line}
    cluster.client("scontrol", "requeue", number)
    code, document, _ = run.result()
    assert "started again, attempt 1" in run.text
    assert (code, document["status"]) == (0, "PASSED"), run.text
    folder = checkout / "build" / "fleet" / document["job"]["id"]
    assert (folder / "attempt-1" / "0" / "result.json").exists()
    again, text = scripted.stackcheck(checkout, "fleet", "collect", document["job"]["id"])
    assert again == 0, text


def test_a_job_that_somebody_cancels_or_that_the_user_gives_up_leaves_nothing(cluster, checkout):
    scripted.let_sleep(checkout)
    try:
        run = Fleet(checkout, 2)
        assert run.until("stackcheck: the suites run"), run.text
        cluster.client("scancel", "--user=root")
        code, _, nodes = run.result()
        assert code == 6
        assert all("stopped this node" in node["reasons"][0] for node in nodes.values()), nodes
        assert containers() == []
        run = Fleet(checkout, 1)
        assert run.until("stackcheck: the suites run"), run.text
        assert run.end(signal.SIGINT) == 130
        assert "cancelling job" in run.text
        small_slurm.wait(lambda: containers() == [] and not cluster.jobs(), "the end of the job", cluster)
    finally:
        let_pass(checkout)


def test_slurms_own_time_limit_ends_what_cannot_end_itself(cluster, checkout):
    scripted.let_sleep(checkout)
    try:
        run = Fleet(checkout, 1)
        assert run.until("stackcheck: the suites run"), run.text
        (number,) = {line.split(":")[0].split()[-1] for line in run.lines if "submitted" in line}
        cluster.client("scontrol", "update", f"jobid={number}", "timelimit=1")
        code, _, nodes = run.result()
    finally:
        let_pass(checkout)
    assert code == 6
    (node,) = nodes.values()
    assert "stopped this node" in node["reasons"][0], node
    small_slurm.wait(lambda: containers() == [] and not cluster.jobs(), "the end of the job", cluster)


def test_a_job_that_slurm_refuses_or_that_gets_no_nodes_is_taken_back(cluster, checkout):
    refused = Fleet(checkout, 2, "--partition", "nope")
    assert refused.end() == 4
    assert "Slurm refused a command" in refused.text
    code, _, nodes = Fleet(checkout, 9, "--queue-limit", "5").result()
    assert code == 6
    assert len(nodes) == 9
    assert all("no nodes within 5 s" in node["reasons"][0] for node in nodes.values()), nodes
    small_slurm.wait(lambda: not cluster.jobs(), "the end of all jobs", cluster)


def test_checks_of_the_cpu_stack_run_on_two_nodes_and_then_over_their_link(
    cpu_stack,
    engine,  # noqa: ARG001  # it has to be there
):
    code, text = scripted.stackcheck(ROOT, "build", cpu_stack.id, "--root", str(ROOT))
    assert code == 0, text
    run = Command(
        ROOT,
        *("fleet", "run", cpu_stack.id, "--nodes", "2", "--json", "--links"),
        *("--only", "test_device_count", "--root", str(ROOT)),
    )
    out, err = run.process.communicate(timeout=900)
    assert run.process.returncode == 0, err
    document = json.loads(out)
    nodes = document["nodes"]
    assert [node["status"] for node in nodes] == ["MEASURED", "MEASURED"]
    assert all(list(node["checks"].values()) == ["passed"] for node in nodes), nodes
    assert all(node["devices"] == ["CPU"] for node in nodes)
    ((one, other, speed),) = document["links"]["pairs"]
    assert (one, other) == ("node1", "node2")
    assert speed > 0
    assert (document["links"]["failed"], document["links"]["culprits"]) == ([], [])
