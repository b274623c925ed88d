"""Nodes work together over a real network: a planted fault is named by its link, a lost node by its name.

Each node is a network namespace with an address of its own, and runs the program that an engine starts on a
node; the containers of the cpu stack meet over the links between the namespaces. A host that may not make
namespaces fails these tests.
"""

import json
import math
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import scripted
import small_network
from small_network import Network, NodesEngine
from small_stacks import ROOT
from stackcheck.cli.fleet_outcome import show
from stackcheck.engine.client import Engine
from stackcheck.fleet import run, training
from stackcheck.fleet.collect import NodeOutcome
from stackcheck.fleet.engines import NodeFacts
from stackcheck.fleet.follow import JobPatience
from stackcheck.fleet.job import new_job
from stackcheck.fleet.run import FleetRun
from stackcheck.matrix.stack import Stack

pytestmark = [pytest.mark.integration, pytest.mark.slow]
PATIENCE = JobPatience(poll_s=0.5, settle_s=1.0)
HANGS_S = 180  # the limit of a group where one hangs: a healthy one needs a fraction of it
GUARD_S = 900  # the same where none hangs
BAND = 2e-4  # relative; the losses of another number of ranks, as in tests/trainers/test_layouts.py


@pytest.fixture(scope="module")
def stack(cpu_stack: Stack, engine: Engine, program_of: Callable[[str, str], Path]) -> Stack:  # noqa: ARG001
    for program, package in (("ip", "iproute2"), ("tc", "iproute2"), ("iptables", "iptables")):
        program_of(program, package)
    code, text = scripted.stackcheck(ROOT, "build", cpu_stack.id, "--root", str(ROOT))
    assert code == 0, text
    return cpu_stack


@pytest.fixture
def passed(stack: Stack) -> Iterator[Callable[[Network], FleetRun]]:
    """Nodes that passed alone: what comes before the stages in which nodes work together."""
    made: list[Path] = []

    def make(network: Network) -> FleetRun:
        count = len(network.names)
        job, _ = new_job(stack.id, ROOT, job_id=f"net{secrets.token_hex(4)}", nodes=count, limit_s=600)
        job.save()
        made.append(job.folder)
        nodes = tuple(
            NodeOutcome(rank=rank, facts=NodeFacts(name=name), status="MEASURED", reasons=())
            for rank, name in enumerate(network.names)
        )
        return FleetRun(job=job, job_id="1", nodes=nodes, stragglers=())

    yield make
    for folder in made:
        for each in folder.parent.glob(f"{folder.name}*"):
            shutil.rmtree(each)


def image_of(stack: Stack) -> str:
    found: str = json.loads((ROOT / "build" / stack.id / "image.json").read_text())["reference"]
    return found


def left_behind(network: Network) -> set[str]:
    """Of this network: one whose test was killed may have left others on this machine."""
    spaces = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in spaces.splitlines()} & set(network.spaces.values())


def culprits(done: FleetRun) -> list[tuple[str, tuple[str, ...]]]:
    assert done.links is not None
    return [(found.kind, found.names) for found in done.links.culprits]


def test_a_slow_and_a_blackholed_link_are_named_and_neither_the_others_nor_a_node(stack, passed):
    lines: list[str] = []
    with small_network.mesh(image_of(stack), "node1", "node2", "node3", "node4") as network:
        network.slow("node1", "node2")
        network.blackhole("node3", "node4")
        done = run.with_links(passed(network), NodesEngine(network), PATIENCE, lines.append, limit_s=HANGS_S)
    show(done)
    assert done.links is not None
    assert culprits(done) == [("link", ("node1", "node2")), ("link", ("node3", "node4"))], (done.links, lines)
    assert "median" in done.links.culprits[0].because
    assert set(done.links.failed) == {("node3", "node4")}
    assert len(done.links.speeds) == 5
    assert done.links.whole_error, "all together need the link that takes no packet"
    assert done.status == "FAILED"
    assert left_behind(network) == set()


def test_a_lossy_link_is_named_of_three_nodes_and_healthy_links_pass(stack, passed):
    with small_network.mesh(image_of(stack), "node1", "node2", "node3") as network:
        network.lossy("node1", "node3")
        done = run.with_links(passed(network), NodesEngine(network), PATIENCE, print, limit_s=GUARD_S)
    show(done)
    assert culprits(done) == [("link", ("node1", "node3"))], done.links
    with small_network.mesh(image_of(stack), "node1", "node2") as network:
        done = run.with_links(passed(network), NodesEngine(network), PATIENCE, print, limit_s=GUARD_S)
    assert done.links is not None
    assert (done.links.is_good, list(done.links.speeds)) == (True, [("node1", "node2")]), done.links


def test_two_nodes_train_one_job_and_the_rest_resumes_it_when_one_is_lost(stack, passed):
    with small_network.mesh(image_of(stack), "node1", "node2") as network:
        whole = run.with_training(passed(network), NodesEngine(network), PATIENCE, print)
        told: list[str] = []
        before = passed(network)
        engine = NodesEngine(network)
        ends = threading.Thread(target=lose_in_the_middle, args=(before, engine, "node2"))
        ends.start()
        broken = run.with_training(before, engine, PATIENCE, told.append)
        ends.join()
    assert whole.training is not None
    assert whole.training.is_good, whole.training.errors
    layouts = whole.training.records
    assert list(layouts) == ["fsdp", "hsdp"]
    for record in layouts.values():
        assert (record.first_step, len(record.losses)) == (0, training.STEPS)
        assert record.losses == pytest.approx(layouts["fsdp"].losses, rel=BAND)
    sys.stdout.write("\n".join(told) + "\n")  # what the user sees
    show(broken)
    found = broken.training
    assert found is not None, told
    assert ([lost.node for lost in found.lost], broken.status) == (["node2"], "FAILED"), told
    assert "not responding" in found.lost[0].because
    assert (found.nodes, found.errors) == (("node1",), ()), told
    resumed = found.records["fsdp"]
    assert resumed.first_step == found.lost[0].at_step["fsdp"]
    assert 0 < resumed.first_step < training.STEPS
    assert resumed.losses == pytest.approx(layouts["fsdp"].losses[resumed.first_step :], rel=BAND)
    assert all(math.isfinite(loss) for loss in found.records["hsdp"].losses)
    document: Any = json.loads((before.job.folder / "fleet.json").read_text())
    assert document["training"]["lost"][0]["node"] == "node2"
    assert left_behind(network) == set()


def lose_in_the_middle(done: FleetRun, engine: NodesEngine, name: str) -> None:
    """As soon as there is a checkpoint to go on from."""
    checkpoints = done.job.folder / "checkpoints" / "fsdp"
    deadline = time.monotonic() + 900
    while not any(checkpoints.glob("step_*/COMPLETE")):
        assert time.monotonic() < deadline, f"no checkpoint in {checkpoints}"
        time.sleep(0.01)
    engine.lose(name)
