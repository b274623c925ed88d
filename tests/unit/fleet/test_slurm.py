"""What Slurm's programs print, as Slurm 22.05 printed it, and the batch script."""

import itertools
from pathlib import Path
from typing import Any

import pytest

from small_fleet import bare_job
from stackcheck.errors import ConfigurationError
from stackcheck.fleet import slurm
from stackcheck.fleet.job import NodeState
from stackcheck.fleet.slurm import Slurm, parse_job, parse_nodes, parse_topology

RUNNING = (
    "JobId=7 JobName=stackcheck-1 UserId=root(0) JobState=RUNNING Reason=None Dependency=(null) Requeue=1 "
    "Restarts=2 BatchFlag=1 ExitCode=0:0 Partition=small ReqNodeList=(null) ExcNodeList=(null) "
    "NodeList=node[1-2],login BatchHost=node1 NumNodes=3 StdOut=/tmp/a=b.log"
)


def test_the_state_of_a_job_is_read() -> None:
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


def test_an_array_waits_while_one_element_does_and_ends_as_the_worst_ended() -> None:
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


def test_the_states_partitions_and_racks_of_nodes_are_read() -> None:
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
def test_no_option_begins_another_line_of_the_batch_script(tmp_path: Path, option: str, text: str) -> None:
    job = bare_job(tmp_path)
    value = text if option == "partition" else (text,)
    plain: Any = {option: "one" if option == "partition" else ("one",)}
    assert "one" in Slurm(**plain).render(job)
    with pytest.raises(ConfigurationError, match="cannot hold this text"):
        Slurm(**{option: value}).render(job)  # type: ignore[arg-type]


def test_what_nodes_said_is_one_listing_and_the_files_of_those_who_said_something_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
