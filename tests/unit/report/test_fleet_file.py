"""The fleet on the page: the verdict, the bad nodes and links first, by rack; hostile names stay text."""

import dataclasses
import json
from pathlib import Path

import fleet_documents
import report_content
from stackcheck.report import fleet_file, markdown, page


def test_the_newest_run_is_shown_with_the_worst_rack_and_node_first(tmp_path: Path) -> None:
    fleet_documents.write(tmp_path, fleet_documents.document(), age_days=0)
    fleet_documents.write(tmp_path, fleet_documents.document(), age_days=3)
    (tmp_path / "build" / "fleet" / "broken").mkdir()
    (tmp_path / "build" / "fleet" / "broken" / "fleet.json").write_text("{")
    found, problems = fleet_file.load_fleets(tmp_path)
    assert [run.job.id for run in found] == ["fleet0", "fleet3"]
    assert len(problems) == 1
    assert "broken" in problems[0]
    newest = found[0]
    assert [(group.rack, group.bad) for group in newest.groups()] == [("rack2", 1), ("rack1", 0)]
    assert newest.groups()[0].nodes[0].status == "FAILED"
    assert newest.checks[0] == fleet_documents.BAD_CHECK
    assert newest.links is not None
    assert newest.links.between("node2", "node1") == newest.links.between("node1", "node2") == "0.04"
    assert newest.links.is_bad("node2", "node1")
    assert not newest.links.is_bad("node1", "node3")


def test_a_large_fleet_shows_every_bad_node_and_a_part_of_the_others(tmp_path: Path) -> None:
    fleet_documents.write(tmp_path, fleet_documents.document(count=1000, links=False), age_days=0)
    ((newest,), _) = fleet_file.load_fleets(tmp_path)
    shown = [node for group in newest.groups() for node in group.nodes]
    assert sum(node.status == "FAILED" for node in shown) == newest.counts["FAILED"] == 1
    assert newest.hidden == 1000 - len(shown) > 0


def test_page_and_markdown_tell_the_verdict_and_run_no_foreign_text(tmp_path: Path) -> None:
    document = fleet_documents.document()
    document["nodes"][0]["reasons"] = [report_content.HOSTILE]
    fleet_documents.write(tmp_path, document, age_days=0)
    fleets, _ = fleet_file.load_fleets(tmp_path)
    made = dataclasses.replace(report_content.whole(), fleets=fleets)
    text = page.render(made).decode()
    for words in ("Is the whole fleet fit?", "rack2, small: 1 of 2 nodes did not pass", "node4 was lost"):
        assert words in text
    assert "<script>alert(1)" not in text
    told = markdown.render(made)
    assert "**FAILED**" in told
    assert "link **node1 - node2**" in told
    assert "<script>" not in told
    json.dumps(document)
