"""The fleet at one look: which node is named, and as what; the page and `status` say the same."""

import datetime as dt
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from report_content import DAY, HOUR, NOW, run, whole
from small_checkout import call
from stackcheck.cli import status
from stackcheck.report import markdown, page, wall

RUNS = st.lists(
    st.builds(
        lambda hours, node, stack, ended: run(hours * HOUR, node=node, stack=stack, status=ended),
        st.integers(min_value=0, max_value=200),
        st.sampled_from(("a", "b", "c")),
        st.sampled_from(("cpu-1", "rocm-2", "sha256:" + "7" * 64)),
        st.sampled_from(("PASSED", "FAILED", "UNFIT")),
    ),
    max_size=12,
)


@given(RUNS)
def test_every_node_is_told_by_its_newest_runs(runs):
    runs.sort(key=lambda one: one.started)
    made = wall.wall(runs, NOW)
    assert {node.name for node in made.nodes} == {one.node for one in runs}
    assert sum(made.counts.values()) == len(made.nodes)
    order = [wall.OUTCOMES.index(node.outcome) for node in made.nodes]
    assert order == sorted(order)
    for node in made.nodes:
        mine = [one for one in runs if one.node == node.name]
        assert node.newest.started == max(one.started for one in mine)
        for stack, cell in node.cells.items():
            assert cell.run == [one for one in mine if one.stack == stack][-1]
        if node.outcome == "passed":
            assert node.newest.status == "PASSED"
            assert NOW - node.newest.started <= wall.LATE


@pytest.mark.parametrize(
    ("runs", "outcome"),
    [
        ([run(HOUR)], "passed"),
        ([run(36 * HOUR)], "passed"),
        ([run(37 * HOUR)], "late"),
        ([run(2 * HOUR, stack="a", status="FAILED"), run(HOUR, stack="b")], "failed"),
        ([run(2 * HOUR, stack="a", status="FAILED"), run(HOUR, stack="a")], "passed"),
        ([run(2 * DAY, stack="a", status="FAILED"), run(HOUR, stack="b")], "passed"),
        ([run(9 * DAY, status="FAILED")], "failed"),  # old, and it failed: the failure is the news
        ([run(HOUR, status="UNFIT")], "unfit"),
        ([], "late"),
    ],
)
def test_a_node_is_as_good_as_its_last_night(runs, outcome):
    assert wall.wall(runs, NOW).outcome == outcome


@pytest.mark.parametrize(
    ("since", "words"),
    [(DAY, "1 d"), (DAY - HOUR, "23 h"), (59 * dt.timedelta(minutes=1), "59 min"), (-HOUR, "0 min")],
)
def test_an_age_is_rounded_down(since, words):
    assert wall.age(NOW - since, NOW) == words


def test_the_page_and_the_terminal_say_the_same():
    runs = [run(HOUR, node="n1", status="FAILED"), run(50 * HOUR, node="n2"), run(HOUR, node="n3")]
    content = whole(runs)
    html = page.render(content).decode()
    rows = re.findall(r'<tr class="(\w+)"><th scope="row">(n\d)', html)
    columns, lines, notes = status.screen(content.wall, (200, 50))
    assert [(row[3].split()[1], row[0]) for row in lines] == rows
    assert rows == [("failed", "n1"), ("late", "n2"), ("passed", "n3")]
    assert "1 failed, 1 late, 1 passed" in notes[-1]
    assert columns[-1] == "1"


def test_a_page_for_a_wall_begins_with_the_fleet_and_refreshes():
    runs = [run(HOUR)]
    usual, hung = (page.render(whole(runs, refresh_s=each)).decode() for each in (None, 300))
    assert 'id="refresh"' not in usual
    assert 'id="refresh" data-seconds="300" checked' in hung
    assert usual.index('id="certified"') < usual.index('id="wall"')
    assert hung.index('id="wall"') < hung.index('id="certified"')
    assert usual.count('id="wall"') == hung.count('id="wall"') == 1


def test_a_thousand_nodes_fit_the_screen_the_worst_first_and_the_page():
    runs = [run(HOUR + n * dt.timedelta(seconds=1), node=f"node{n:04}") for n in range(1000)]
    runs += [run(HOUR, node="bad", status="FAILED")]
    content = whole(runs)
    columns, rows, notes = status.screen(content.wall, (80, 24))
    assert rows[0][0] == "bad"
    assert 1 + len(rows) + len(notes) < 24
    assert all(sum(map(len, row)) + 2 * (len(row) - 1) <= 80 for row in (columns, *rows))
    assert "more, none worse than these" in notes[0]
    assert len(page.render(content)) < 1_000_000


def test_no_control_character_reaches_a_screen_that_status_draws_by_itself():
    evil = "n\x1b[2J\u202e\x9b31m"
    content = whole([run(HOUR, node=evil, driver=evil)])
    columns, rows, notes = status.screen(content.wall, (200, 50))
    assert rows
    assert all(text.isprintable() for text in (*columns, *(cell for row in rows for cell in row), *notes))


@pytest.mark.usefixtures("own_home")
def test_status_answers_without_a_history(capsys):
    assert "no run is kept yet" in call(capsys, "status").out
    assert json.loads(call(capsys, "status", "--json").out)["nodes"] == []


def test_an_image_from_elsewhere_has_its_name_and_an_old_record_says_that_it_kept_none():
    content = whole([run(HOUR, stack="rocm-pytorch-2.9"), run(2 * HOUR, stack="sha256:" + "7" * 64)])
    said = f"sha256:{'7' * 12}… (no name was kept)"
    html, notes = page.render(content).decode(), status.screen(content.wall, (200, 50))[2]
    for texts in (re.findall(r'data-stack="([^"]*)"', html), [note[3:] for note in notes[:-1]]):
        assert sorted(texts) == ["rocm-pytorch-2.9", said]
    assert said in markdown.render(content)
