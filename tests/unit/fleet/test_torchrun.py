"""One node's share of a program: where torchrun meets by each engine's variables, and what Slurm prints."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_files import HasFiles
from small_fleet import bare_job
from small_subjects import subject_of
from stackcheck.engine.client import RunSpec
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.fleet import slurm
from stackcheck.fleet.job import NodeState
from stackcheck.fleet.link_stage import LinkPlan, NodeGroup
from stackcheck.fleet.rendezvous import Rendezvous, find, hostnames
from stackcheck.fleet.slurm import Slurm, parse_job, parse_nodes, parse_topology
from stackcheck.fleet.together import LinkNode, Torchrun

PLACE = Rendezvous(nodes=3, rank=1, address="10.0.0.1", port=29501, source="the plan")


class FakeEngine(HasFiles):
    """Prints 30 lines and ends with a code; None: it does not end in time."""

    def __init__(self, code: int | None) -> None:
        self.code = code
        self.specs: list[RunSpec] = []

    def inspect(self, _reference: str) -> Any:
        return SimpleNamespace(env={})

    def run(self, spec: RunSpec) -> int:
        self.specs.append(spec)
        assert spec.on_line
        for number in range(30):
            spec.on_line(f"line {number}")
        if self.code is None:
            raise ChecksFailedError("it did not end in time")
        return self.code


def programs(folder: Path, code: int | None) -> Torchrun:
    engine: Any = FakeEngine(code)
    subject = subject_of("some:tag", folder)
    return Torchrun(job=bare_job(folder), subject=subject, engine=engine, suite=folder / "suite")


@pytest.mark.parametrize(
    ("code", "error"),
    [(0, None), (7, "exit code 7: line 27 | line 28 | line 29"), (None, "did not end within 60 s")],
)
def test_the_end_of_a_program_is_told_with_its_last_lines(tmp_path, code, error):
    ended = programs(tmp_path, code).run(PLACE, 2, ("workloads.x", "1"), limit_s=60)
    assert ended.error == error
    assert ended.lines == [f"line {number}" for number in range(10, 30)]


def test_a_program_meets_the_others_where_the_plan_says(tmp_path):
    made = programs(tmp_path, 0)
    made.run(PLACE, 2, ("workloads.x", "1"), limit_s=60)
    (spec,) = made.engine.specs  # type: ignore[attr-defined]
    words = (
        "--nnodes=3",
        "--node-rank=1",
        "--nproc-per-node=2",
        "--master-addr=10.0.0.1",
        "--master-port=29501",
    )
    assert spec.command[-8:] == (*words, "-m", "workloads.x", "1")
    assert (spec.network, spec.timeout_s) == ("host", 60)


@pytest.mark.parametrize(
    ("name", "code", "told"), [("b", 0, ""), ("b", 1, "exit code 1"), ("a", 0, "line 29")]
)
def test_only_the_first_node_of_a_group_has_to_print_figures(tmp_path, name, code, told):
    group = NodeGroup(names=["a", "b"], address="10.0.0.1", port=29501)
    node = LinkNode(programs=programs(tmp_path, code), name=name, attempt=tmp_path, report=lambda _: None)
    error = node._group(LinkPlan(rounds=[[group]], limit_s=60), 0, group).error
    assert told in (error or "")
    assert (error is None) == (not told)


SLURM = {
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "3",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_JOB_NODELIST": "gpu[08-10],login",
}
POD = {
    "JOB_COMPLETION_INDEX": "2",
    "STACKCHECK_NODES": "4",
    "STACKCHECK_JOB": "stackcheck-7",
    "STACKCHECK_SERVICE": "stackcheck-7",
}
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
KUBEFLOW = {
    "PET_NNODES": "2",
    "PET_NODE_RANK": "0",
    "PET_MASTER_ADDR": "trainer-0",
    "PET_MASTER_PORT": "29400",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, (1, 0, "127.0.0.1", 29500)),
        (KUBEFLOW, (2, 0, "trainer-0", 29400)),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1234", "NODE_RANK": "1", "NNODES": "2"}, (2, 1, "a", 1234)),
        (SLURM, (3, 1, "gpu08", 29500)),
        (SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "gpu[09-10]"}, (2, 1, "gpu09", 29500)),
        (SLURM | {"MASTER_ADDR": "gpu08-ib0"}, (3, 1, "gpu08-ib0", 29500)),
        (POD, (4, 2, "stackcheck-7-0.stackcheck-7", 29500)),
        (SKYPILOT, (2, 1, "10.0.0.1", 29500)),
        (SLURM | KUBEFLOW, (2, 0, "trainer-0", 29400)),  # torchrun's own words come first
        ({"MASTER_ADDR": "left-over"}, (1, 0, "127.0.0.1", 29500)),
    ],
)
def test_each_engine_says_where(variables, place):
    found = find(variables)
    assert (found.nodes, found.rank, found.address, found.port) == place
    assert found.variables()["PET_NODE_RANK"] == str(place[1])


@pytest.mark.parametrize(
    ("variables", "where"),
    [
        ({"PET_NODE_RANK": "0"}, "PET_MASTER_ADDR"),
        (KUBEFLOW | {"PET_NNODES": "1:4"}, "PET_NNODES"),
        (KUBEFLOW | {"PET_NODE_RANK": "2"}, "PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR"),
        (POD | {"STACKCHECK_SERVICE": ""}, "MASTER_ADDR"),
        ({"JOB_COMPLETION_INDEX": "0"}, "MASTER_ADDR"),
        (SKYPILOT | {"SKYPILOT_NODE_IPS": ""}, "the first of SKYPILOT_NODE_IPS"),
        (SLURM | {"SLURM_NNODES": "many"}, "SLURM_NNODES"),
        ({"MASTER_ADDR": "a", "NODE_RANK": "-1", "NNODES": "2"}, "NODE_RANK"),
    ],
)
def test_half_a_set_of_variables_is_refused(variables, where):
    with pytest.raises(ConfigurationError) as error:
        find(variables)
    assert error.value.where == where


def test_slurms_short_form_of_names_is_read():
    text = "a1,gpu[01-03,7],rack[2-3]-n,b"
    assert list(hostnames(text)) == ["a1", "gpu01", "gpu02", "gpu03", "gpu7", "rack2-n", "rack3-n", "b"]
    assert list(hostnames("")) == []
    assert list(hostnames("r[1-2]n[09-10].a,b")) == ["r1n09.a", "r1n10.a", "r2n09.a", "r2n10.a", "b"]


RUNNING = (
    "JobId=7 JobName=stackcheck-1 UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=2 BatchFlag=1 ExitCode=0:0 Partition=small ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=node[1-2],login BatchHost=node1 NumNodes=3 StdOut=/tmp/a=b.log"
)


def test_the_state_of_a_job_is_read():
    found = parse_job(RUNNING)
    assert (found.phase, found.attempt, found.nodes) == ("running", 2, ("node1", "node2", "login"))
    pending = RUNNING.replace("RUNNING", "PENDING").replace("Reason=None", "Reason=Resources")
    found = parse_job(pending.replace("NodeList=node[1-2],login", "NodeList=(null)"))
    assert (found.phase, found.reason, found.nodes, found.is_over) == ("waiting", "Resources", (), False)
    for word, phase in (
        ("TIMEOUT", "out of time"),
        ("CANCELLED", "cancelled"),
        ("NODE_FAIL", "a node failed"),
    ):
        assert parse_job(RUNNING.replace("RUNNING", word)).phase == phase
    assert parse_job(RUNNING.replace("RUNNING", "COMPLETING")).is_over
    # What is not understood is no end: RUNNING becomes SIGNALING until every node has taken the signal.
    for text in ("", *(RUNNING.replace("RUNNING", word) for word in ("SIGNALING", "STAGE_OUT", "NEW_WORD"))):
        assert parse_job(text).phase == "running"


def test_an_array_waits_while_one_element_does_and_ends_as_the_worst_ended():
    lines = [
        f"JobId={9 - task} ArrayJobId=7 ArrayTaskId={task} {RUNNING[RUNNING.index('JobName') :]}"
        for task in range(3)
    ]
    lines = [line.replace("node[1-2],login", f"gpu{task}") for task, line in enumerate(lines)]
    waiting = (
        lines[0]
        .replace("ArrayTaskId=0", "ArrayTaskId=3-9%4")
        .replace("RUNNING", "PENDING")
        .replace("=gpu0", "=")
    )
    for text in itertools.permutations([lines[0], lines[2], waiting]):
        found = parse_job("\n".join(text))
        assert (found.phase, found.nodes) == ("waiting", ("gpu0", "", "gpu2"))
    ended = [
        line.replace("RUNNING", word)
        for line, word in zip(lines, ("COMPLETED", "TIMEOUT", "COMPLETED"), strict=True)
    ]
    assert (parse_job("\n".join(ended)).phase, parse_job("\n".join([*ended[:2], lines[2]])).phase) == (
        "out of time",
        "running",
    )


def test_the_states_partitions_and_racks_of_nodes_are_read():
    switches = parse_topology(
        "SwitchName=rack1 Level=0 LinkSpeed=1 Nodes=node[1-2]\n"
        "SwitchName=rack2 Level=0 LinkSpeed=1 Nodes=node[3-4]\n"
        "SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=rack[1-2]\n"
    )
    assert switches == {"node1": "rack1", "node2": "rack1", "node3": "rack2", "node4": "rack2"}
    text = "node1|small|allocated|none\nnode1|big|allocated|none\nnode3|small|down*|Not responding\n"
    text += "node4|small|idle*|none\nnode5|small|drained|stackcheck: FAILED | twice\n"
    found = parse_nodes(text, switches)
    assert (found["node1"].partition, found["node1"].rack, found["node1"].alive) == (
        "small,big",
        "rack1",
        True,
    )
    assert (found["node3"].alive, found["node3"].words) == (False, "down*: Not responding")
    assert not found["node4"].alive, "the star: it does not answer"
    assert (found["node5"].alive, found["node5"].words) == (True, "drained: stackcheck: FAILED | twice")


@pytest.mark.parametrize("text", ["a\nrm -rf x", "a\r\nid", "a\x0bid", "a\u2028id", "a\x1b[2J"])
@pytest.mark.parametrize("option", ["partition", "nodelist", "exclude", "options", "program"])
def test_no_option_begins_another_line_of_the_batch_script(tmp_path, option, text):
    job = bare_job(tmp_path)
    value = text if option == "partition" else (text,)
    plain: Any = {option: "one" if option == "partition" else ("one",)}
    assert "one" in Slurm(**plain).render(job)
    with pytest.raises(ConfigurationError, match="cannot hold this text"):
        Slurm(**{option: value}).render(job)  # type: ignore[arg-type]


def test_what_nodes_said_is_one_listing_and_the_files_of_those_who_said_something_new(tmp_path, monkeypatch):
    job, engine, read = bare_job(tmp_path), Slurm(), list[str]()
    real = slurm.read_state
    monkeypatch.setattr(slurm, "read_state", lambda folder: (read.append(folder.name), real(folder))[1])
    assert engine.node_states(job, 0) == {}
    told = {rank: NodeState(rank=rank, node=f"n{rank}", state="running") for rank in range(3)}
    for rank, state in told.items():
        state.write(job.attempt(0) / str(rank))
    assert engine.node_states(job, 0) == told
    assert engine.node_states(job, 0) == told
    assert sorted(read) == ["0", "1", "2"], "the second look read no file"
    told[1] = NodeState(rank=1, node="n1", state="failed", code=6, error="no")
    told[1].write(job.attempt(0) / "1")
    (job.attempt(0) / "said" / "8.ended").touch()  # before its file can be seen
    (job.attempt(0) / "said" / "77.ended").touch()  # of no rank
    (job.attempt(0) / "said" / "x").touch()
    assert engine.node_states(job, 0) == told
    assert read.count("0") == 1
    told[8] = NodeState(rank=8, node="n8", state="ended")
    told[8].write(job.attempt(0) / "8")
    assert engine.node_states(job, 0) == told
    assert engine.node_states(job, 1) == {}, "another attempt"
