"""No node takes a certificate back for the whole fleet: two have to agree, or a person does."""

from pathlib import Path
from typing import Any

import pytest

import small_checkout as checkouts
from nights import Nights, Node
from small_checkout import CHECKS
from stackcheck.matrix import resolve
from stackcheck.nightly import summary
from stackcheck.vendors import amd

pytestmark = pytest.mark.usefixtures("no_disk_flushes")

REAL_AMD = {name: getattr(amd, name) for name in ("devices", "driver", "present")}
GEMM = CHECKS[1]


@pytest.fixture
def nights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Nights:
    made = Nights(tmp_path, checkouts.make_checkout(tmp_path, monkeypatch), monkeypatch, REAL_AMD)
    made.finds = lambda _digest, _driver, _run: {}
    return made


def nodes(nights: Nights, revoke: str, *, shared: bool) -> tuple[Node, Node]:
    """Two nodes, with one history or with two."""
    found = tuple(
        nights.node(name, revoke=revoke, first_id=number) for name, number in (("a", 100), ("b", 200))
    )
    if shared:
        for node in found:
            with (node.root / "matrix.yaml").open("a", encoding="utf-8") as file:
                file.write(
                    f"\nhistory: {{records: {nights.folder / 'history'}, index: 'sqlite:///{nights.folder}/i.db'}}\n"
                )
    (stack,) = resolve.load_stacks(found[0].root, ("rocm7.1.0-torch2.10.0-*",))
    nights.publish(found[0], stack, "A1")
    return found[0], found[1]


def ended(nights: Nights, node: Node) -> Any:
    plan = nights.play(node, force=True)
    (item,) = plan.items
    assert item.ended is not None
    assert summary.exit_code(plan) == item.ended.exit_code
    return item.ended


def test_the_second_node_that_finds_the_same_revokes(nights: Nights) -> None:
    first, second = nodes(nights, "quorum 2", shared=True)
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    for _ in range(2):  # the same node again is no second word
        told = ended(nights, first)
        assert (told.action, told.exit_code) == ("hold", 6)
        assert "a person has to decide: it failed twice, on 1 of the 2 nodes" in told.because
    assert ended(nights, second).action == "revoke"


@pytest.mark.parametrize(("revoke", "shared"), [("quorum 2", False), ("report", True), ("quorum 3", True)])
def test_nodes_that_do_not_hear_of_each_other_or_must_not_leave_it_to_a_person(
    nights: Nights, revoke: str, *, shared: bool
) -> None:
    first, second = nodes(nights, revoke, shared=shared)
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    assert [ended(nights, node).action for node in (first, second)] == ["hold", "hold"]


@pytest.mark.parametrize("here", [{CHECKS[2]: "failed"}, {GEMM: "failed", CHECKS[2]: "invalid"}])
def test_another_failure_or_an_unfit_machine_there_is_no_agreement(
    nights: Nights, here: dict[str, str]
) -> None:
    first, second = nodes(nights, "quorum 2", shared=True)
    nights.finds = lambda _digest, _driver, _run: here
    assert ended(nights, first).action == "hold"
    nights.finds = lambda _digest, _driver, _run: {GEMM: "failed"}
    assert ended(nights, second).action == "hold"
