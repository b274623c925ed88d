"""What a report gathers: a real history, what a target publishes, what others measured, the fleet."""

import dataclasses
import datetime as dt
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import fleet_documents
import report_content
import result_files
from report_content import HOSTILE, MACHINE, run, whole
from small_checkout import call
from small_images import NOW, new_key
from small_target import Publisher
from stackcheck.certificate.policy import MAX_AGE
from stackcheck.errors import CertificateError, ChecksFailedError
from stackcheck.history.history import History
from stackcheck.oci.documents import RegistryError
from stackcheck.proof import contribution
from stackcheck.report import content, markdown, others, page, verb_files
from stackcheck.report.published import PublishedImage, is_there, published
from stackcheck.report.standing import StandingMachine

HOUR = dt.timedelta(hours=1)
DAY = dt.timedelta(days=1)


def read(publisher: Publisher, now: dt.datetime = NOW + HOUR) -> tuple[PublishedImage, ...]:
    return published(publisher.target, publisher.key.public_key(), now, MAX_AGE)


def test_a_published_image_is_certified_for_the_machine_of_its_run(publisher):
    publisher.publish(publisher.image(b"one"))
    (found,) = read(publisher)
    assert (found.standing, found.current) == ("certified", True)
    (machine,) = found.machines
    assert (machine.device_model, machine.driver, machine.device_count) == ("CPU", None, 1)
    assert machine.expires == NOW + MAX_AGE


def test_it_expires(publisher):
    publisher.publish(publisher.image(b"one"))
    assert read(publisher, NOW + 31 * DAY)[0].standing == "expired"


def test_a_revoked_image_says_why_and_what_it_was_certified_for(publisher):
    publisher.publish(publisher.image(b"one"))
    publisher.revoke(publisher.reference)
    (found,) = read(publisher, NOW + 2 * HOUR)
    assert (found.standing, found.reason) == ("revoked", "NaN")
    assert found.machines[0].device_model == "CPU"


def test_what_another_key_signed_certifies_nothing(publisher):
    publisher.publish(publisher.image(b"one"))
    (found,) = published(publisher.target, new_key().public_key(), NOW + HOUR, MAX_AGE)
    assert (found.standing, found.machines) == ("not certified", ())


def test_only_the_newest_image_of_a_stack_is_current(publisher):
    publisher.publish(publisher.image(b"one"))
    publisher.publish(publisher.image(b"two"))
    assert [image.current for image in read(publisher)] == [True, False]


def test_a_certificate_from_the_future_certifies_nothing(publisher):
    publisher.publish(publisher.image(b"one"))
    assert read(publisher, NOW - DAY)[0].standing == "not certified"


def test_a_layout_that_was_never_made_holds_nothing_and_a_damaged_one_is_an_error(publisher):
    assert not is_there(publisher.target)
    publisher.publish(publisher.image(b"one"))
    assert is_there(publisher.target)
    Path(publisher.target.removeprefix("oci:"), "index.json").write_text("{")
    with pytest.raises(RegistryError):
        read(publisher)


MOMENT = dt.datetime(2026, 1, 2, 12, tzinfo=dt.UTC)
VERDICT = {"status": "FAILED", "reasons": ["it failed"], "failed": ["test_a.py::test_one"], "warned": []}


@pytest.fixture
def history(tmp_path) -> History:
    """Two nights of one stack on a processor."""
    found = History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}")
    for day in (1, 2):
        check = result_files.check(
            "test_a.py::test_one", "failed", reason="dq is nan", metrics=[result_files.metric()]
        )
        times = {"started": f"2026-01-0{day}T03:00:00Z", "finished": f"2026-01-0{day}T03:05:00Z"}
        text = json.dumps(result_files.result(check, run_id=f"{day}" * 8, **times)).encode()
        found.append(text, VERDICT, None, source="test", simulated=day == 1)
    return found


def gathered(history: History, tmp_path: Path, **changes: Any) -> content.Content:
    options: dict[str, Any] = {"root": tmp_path, "now": MOMENT, "since": None, "report": lambda _line: None}
    return content.gather(history, content.Offered(target="oci:dist"), **(options | changes))


def test_a_report_has_the_runs_figures_and_failures_of_its_history(history, tmp_path):
    found = gathered(history, tmp_path)
    assert [run.simulated for run in found.runs] == [True, False]
    assert found.groups[0].series[0].values == (10.0, 10.0)
    (trouble,) = found.night.troubles
    assert found.details[trouble.run.record].failures[0].reason == ("dq is nan",)
    assert "dq is nan" in page.render(found).decode()


def test_older_runs_are_left_out(history, tmp_path):
    assert len(gathered(history, tmp_path, since=MOMENT - dt.timedelta(days=1)).runs) == 1


def test_a_damaged_record_is_named_and_hides_nothing_else(history, tmp_path):
    newest = gathered(history, tmp_path).runs[-1].record
    (path,) = (tmp_path / "records").rglob(f"{newest.removeprefix('sha256:')}*")
    path.write_bytes(b"damaged")
    lines: list[str] = []
    found = gathered(history, tmp_path, report=lines.append)
    assert len(found.runs) == 2
    assert any(newest in problem for problem in found.problems)
    assert any(newest in line for line in lines)
    text = page.render(found).decode()
    assert "Not read: " in text
    assert "it failed" in text  # the index still says why


def test_an_unknown_host_is_not_shown_first_but_an_asked_machine_is(history, tmp_path):
    processor = StandingMachine(device_model="CPU", driver="")
    assert gathered(history, tmp_path, here=MACHINE).here == processor
    asked = gathered(history, tmp_path, asked=MACHINE)
    assert asked.here == MACHINE
    assert "<strong>No image</strong> is certified for <b>MI300X</b>" in page.render(asked).decode()


def test_windows_of_points_lose_and_double_nothing(history, tmp_path, monkeypatch):
    monkeypatch.setattr(content, "WINDOW", 1)
    assert gathered(history, tmp_path).groups[0].series[0].values == (10.0, 10.0)


ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs" / "results" / "contributed"


def bundle(model: str, signer: str, day: str, value: float) -> contribution.Bundle:
    figure = {"metric": "gemm_tflops", "conditions": {"m": 8192}, "value": value, "unit": "TFLOP/s"}
    told = {
        "model": model,
        "count": 1,
        "driver": None,
        "versions": {},
        "tier": "standard",
        "day": day,
        "suites": "sha256:" + "1" * 64,
        "verdict": "PASSED",
        "checks": {},
        "figures": [figure],
    }
    made = contribution.Contribution.model_validate_json(json.dumps(told))
    return contribution.Bundle(file=FOLDER, signer=signer, told=made)


def test_a_model_has_the_median_of_its_own_bundles():
    given = [bundle("A", "k1", "2026-01-03", 1.0), bundle("A", "k2", "2026-01-01", 2.0)]
    given += [bundle("A", "k2", "2026-01-02", 9.0), bundle("B", "k1", "2026-01-09", 100.0)]
    made = others.of_model(given, "A")
    assert (made.bundles, made.contributors, made.passed) == (3, 2, 3)
    assert made.days == ("2026-01-01", "2026-01-03")
    (figure,) = made.figures
    assert (figure.conditions, figure.median, figure.unit, figure.runs) == ("m=8192", 2.0, "TFLOP/s", 3)


def test_the_page_has_one_table_a_model_and_opens_that_of_the_first_machine():
    made = tuple(
        others.of_model([bundle(name, "k", "2026-01-01", 650.4)], name) for name in ("H100", HOSTILE)
    )
    html = page.render(whole([run(device_model="H100")], others=made)).decode()
    assert html.count('<table class="others">') == 2
    assert "<details open><summary>What others measured on <b>H100</b>: 1 run of 1 contributor" in html
    assert '<td class="number">650.4 TFLOP/s</td>' in html
    assert HOSTILE not in html
    assert 'id="others"' not in page.render(whole([run()])).decode()


@pytest.mark.usefixtures("own_home")
def test_the_committed_bundles_come_to_the_page(tmp_path, capsys):
    out = tmp_path / "page.html"
    call(capsys, "report", "--others", FOLDER, "--root", ROOT, "--history", kept(tmp_path), "--out", out)
    html = out.read_text()
    for path in FOLDER.glob(f"*{contribution.END}"):
        assert f"What others measured on <b>{path.name.split('-')[0].upper()}</b>" in html


def kept(tmp_path: Path) -> Path:
    from stackcheck.history.history import History

    (tmp_path / "records").mkdir()
    History(str(tmp_path / "records"), f"sqlite:///{tmp_path / 'index.sqlite'}").rebuild()
    return tmp_path


@pytest.mark.parametrize("damage", ["another key", "a changed byte", "no bundle"])
def test_a_wrong_bundle_stops_the_report(tmp_path, damage):
    folder = tmp_path / "contributed"
    shutil.copytree(FOLDER, folder)
    (first, *rest) = sorted(folder.glob(f"*{contribution.END}"))
    if damage == "another key":
        other = ROOT / "docs" / "results"
        (folder / contribution.KEYS).write_bytes(next(other.rglob("stackcheck.pub")).read_bytes())
    elif damage == "a changed byte":
        text = first.read_text()
        at = text.index('"payload":"') + 400
        first.write_text(text[:at] + ("A" if text[at] != "A" else "B") + text[at + 1 :])
    else:
        for path in (first, *rest):
            path.unlink()
    with pytest.raises((CertificateError, ChecksFailedError)):
        others.load_others(folder, ROOT)


def test_the_newest_run_is_shown_with_the_worst_rack_and_node_first(tmp_path):
    fleet_documents.write(tmp_path, fleet_documents.document(), age_days=0)
    fleet_documents.write(tmp_path, fleet_documents.document(), age_days=3)
    (tmp_path / "build" / "fleet" / "broken").mkdir()
    (tmp_path / "build" / "fleet" / "broken" / "fleet.json").write_text("{")
    found, problems = verb_files.load_fleets(tmp_path)
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


def test_a_large_fleet_shows_every_bad_node_and_a_part_of_the_others(tmp_path):
    fleet_documents.write(tmp_path, fleet_documents.document(count=1000, links=False), age_days=0)
    ((newest,), _) = verb_files.load_fleets(tmp_path)
    shown = [node for group in newest.groups() for node in group.nodes]
    assert sum(node.status == "FAILED" for node in shown) == newest.counts["FAILED"] == 1
    assert newest.hidden == 1000 - len(shown) > 0


def test_page_and_markdown_tell_the_verdict_and_run_no_foreign_text(tmp_path):
    document = fleet_documents.document()
    document["nodes"][0]["reasons"] = [report_content.HOSTILE]
    fleet_documents.write(tmp_path, document, age_days=0)
    fleets, _ = verb_files.load_fleets(tmp_path)
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
