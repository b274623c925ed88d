"""One node's share of a program: where it meets the others, and how its end is told."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fake_files import HasFiles
from small_fleet import bare_job
from small_subjects import subject_of
from stackcheck.engine.client import RunSpec
from stackcheck.errors import ChecksFailedError
from stackcheck.fleet.link_stage import LinkPlan, NodeGroup
from stackcheck.fleet.rendezvous import Rendezvous
from stackcheck.fleet.together import LinkNode
from stackcheck.fleet.torchrun import Torchrun

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
def test_the_end_of_a_program_is_told_with_its_last_lines(
    tmp_path: Path, code: int | None, error: str | None
) -> None:
    ended = programs(tmp_path, code).run(PLACE, 2, ("workloads.x", "1"), limit_s=60)
    assert ended.error == error
    assert ended.lines == [f"line {number}" for number in range(10, 30)]


def test_a_program_meets_the_others_where_the_plan_says(tmp_path: Path) -> None:
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
def test_only_the_first_node_of_a_group_has_to_print_figures(
    tmp_path: Path, name: str, code: int, told: str
) -> None:
    group = NodeGroup(names=["a", "b"], address="10.0.0.1", port=29501)
    node = LinkNode(programs=programs(tmp_path, code), name=name, attempt=tmp_path, report=lambda _: None)
    error = node._group(LinkPlan(rounds=[[group]], limit_s=60), 0, group).error
    assert told in (error or "")
    assert (error is None) == (not told)
