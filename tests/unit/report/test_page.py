"""The page: answers in order, marks on what is simulated, and nothing from outside that becomes markup."""

import dataclasses
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import pytest

from report_content import HOSTILE, HOUR, NOW, STACK, certified, failed_detail, image, point, run, whole
from stackcheck.errors import ConfigurationError
from stackcheck.report import blocks, content, page, verb_files
from stackcheck.report.content import Content


class Reader(HTMLParser):
    """The elements of a page, its text without scripts, and its data blocks."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.blocks: dict[str, str] = {}
        self._in: tuple[str, str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        if tag in {"script", "style"}:
            self._in = (tag, found.get("id") or "")

    def handle_endtag(self, tag: str) -> None:
        if self._in and tag == self._in[0]:
            self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is None:
            self.words.append(data)
        elif self._in[1]:
            self.blocks[self._in[1]] = data

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


def shown(made: Content) -> Reader:
    return Reader(page.render(made).decode())


def everything(name: str = STACK) -> Content:
    """A report that has all of its parts, with one name from outside everywhere."""
    failed = run(HOUR, stack=name, driver=name, node=name, status="FAILED", reasons=(name,), failed=(name,))
    passed = run(2 * HOUR, stack=name, simulated=True)
    waiver = {"check": name, "reason": name, "until": "2026-04-01", "by": name, "issue": name}
    issue = {"symptom": name, "issue": name, "fixed_in": name}
    offer = image(
        certified(driver=name, warned=(name,), waivers=(waiver,)),
        stack=name,
        reference=name,
        known_issues=(issue,),
    )
    lost = image(certified(), stack=name, standing="revoked", reason=name)
    faults = verb_files.Campaign(
        planted=1,
        caught=0,
        healthy_runs=1,
        false_alarms=0,
        faults=(verb_files.PlantedFault(name=name, check=name, state="missed"),),
    )
    return whole(
        [failed, passed],
        [offer, lost],
        [point(failed, 5, name, check=name, unit=name)],
        details={failed.record: failed_detail(name, name)},
        campaign=faults,
        nightly=nightly(name),
        problems=(name,),
    )


def nightly(name: str) -> verb_files.NightlyFile:
    document = {
        "schema": 1,
        "started": "2026-03-04T02:00:00Z",
        "node": name,
        "line": name,
        "warnings": [name],
        "reboot_pending": name,
        "skipped": [{"tag": name, "why": name, "for_here": True}],
        "images": [],
    }
    return verb_files.NightlyFile.model_validate_json(json.dumps(document))


def test_the_questions_are_answered_in_order():
    found = shown(everything())
    heads = [
        found.text.index(words) for words in ("What is certified", "What failed last night", "How fast is")
    ]
    assert heads == sorted(heads)


def test_a_hostile_name_is_only_ever_text():
    plain, hostile = shown(everything("plain")), shown(everything(HOSTILE))
    assert [tag for tag, _ in hostile.tags] == [tag for tag, _ in plain.tags]
    assert not [name for _, found in hostile.tags for name in found if name.startswith("on")]
    assert "alert(1)" in hostile.text


def test_the_page_names_no_address_to_load_from():
    for tag, found in shown(everything()).tags:
        for name in ("src", "href", "srcset", "action", "data", "poster"):
            assert (found.get(name) or "#").startswith(("#", "data:")), (tag, found)
    assert "@import" not in page.render(everything()).decode()
    assert not re.search(r"url\(", page.render(everything()).decode())


def test_the_policy_forbids_the_network_and_foreign_scripts():
    (policy,) = [
        found["content"] for tag, found in shown(everything()).tags if found.get("http-equiv") is not None
    ]
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert "unsafe-eval" not in policy


def test_our_scripts_make_no_markup_of_text():
    for name in page.SCRIPTS[1:]:
        source = page._asset(name)
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("):
            assert way not in source, (name, way)


def test_what_is_certified_names_image_waivers_issues_and_the_command():
    found = shown(everything("odd-name"))
    assert "1 image is certified" in found.text
    assert "stackcheck pull odd-name" in found.text
    assert "Waived odd-name" in found.text
    assert "Known issue odd-name" in found.text


def test_unknown_certificates_are_never_shown_as_none_or_some():
    offered = content.Offered(target="registry.example.org/x", problem="it does not answer")
    found = shown(whole([run()], [], offered=offered))
    assert "It is not known what is certified" in found.text
    assert "No image is certified" not in found.text


def test_nothing_certified_says_where_else():
    found = shown(whole([run(driver="31.40.1")], [image(certified())], here=None))
    assert "No image is certified for MI300X with driver 31.40.1" in found.text
    assert "Certified elsewhere: 1 image for MI300X, driver 30.30.3" in found.text


def test_an_empty_history_and_target_give_a_page_with_the_next_step():
    found = shown(whole())
    assert "Nothing is certified, and nothing ran yet." in found.text
    assert "make images" in found.text


def marks(made: Content) -> int:
    return sum("simulated" in (found.get("class") or "") for _, found in shown(made).tags)


def test_simulated_runs_are_marked_and_counted_wherever_they_show():
    failed = run(HOUR, status="FAILED", simulated=True, run_id="made-up")
    made = whole([failed], [image(certified(run_id="made-up"))])
    found = shown(made)
    assert "1 run of 1 were not run on any machine" in found.text
    # The notice, the certificate, the legend, the cell of the grid, and last night's failure.
    assert marks(made) >= 5
    assert json.loads(found.blocks["data-runs"])["rows"][0][9] == 1


def test_real_runs_carry_no_such_mark():
    assert marks(whole([run(HOUR, status="FAILED")], [image(certified())])) == 0


def test_last_night_names_the_failed_check_what_it_proves_and_why():
    failed = run(HOUR, status="FAILED", reasons=("failed",))
    told = failed_detail("test_a.py::test_nan", "dq is nan")
    found = shown(whole([failed], details={failed.record: told}))
    assert "1 of 1 run failed." in found.text
    for words in ("test_a.py::test_nan", "Proves: It is right.", "dq is nan", "new : its first run here"):
        assert words in found.text.replace("new:", "new :")


def test_a_run_whose_record_is_not_read_still_says_why_it_failed():
    found = shown(whole([run(HOUR, status="FAILED", reasons=("zero results",))]))
    assert "zero results" in found.text


def test_a_night_without_runs_is_said():
    assert "No run in the 24 hours before this page" in shown(whole([run(30 * HOUR)])).text


def test_what_the_night_did_not_run_is_listed_with_its_reason():
    found = shown(whole([run()], nightly=nightly("odd-name")))
    assert "1 image was not run, and why odd-name : odd-name" in found.text.replace("odd-name:", "odd-name :")
    assert "A reboot is pending, so nothing was run: odd-name" in found.text


def test_a_damaged_file_of_the_night_is_an_error(tmp_path):
    path = tmp_path / "night.json"
    path.write_text('{"schema": 2}')
    with pytest.raises(ConfigurationError) as error:
        verb_files.load_night(path)
    assert "stackcheck nightly" in str(error.value)


def test_states_have_words_beside_shapes():
    found = shown(whole([run(HOUR, status="FAILED")], []))
    cell = [tag for tag, attributes in found.tags if attributes.get("class") == "failed"]
    assert cell == ["td", "tr", "td"]  # of the machine; of the node, and of its stack
    assert "failed 04 Mar · 1 run" in found.text


def test_a_missed_fault_is_named():
    found = shown(everything("odd-name"))
    assert "0 of 1 planted fault were caught" in found.text
    assert "missed: odd-name" in found.text


def test_the_page_of_the_same_content_has_the_same_bytes():
    assert page.render(everything()) == page.render(everything())


def test_each_run_of_a_series_points_to_its_row():
    runs = [run(3 * HOUR), run(2 * HOUR, stack="other"), run(HOUR)]
    made = whole(runs, points=[point(runs[0], 650), point(runs[2], 640)])
    series = json.loads(blocks.blocks(made)["data-series-0"])
    assert series["runs"] == [0, 2]
    assert series["series"][0]["values"] == [650, 640]


@pytest.mark.parametrize(
    ("number", "text"),
    [(1, "1st"), (2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (22, "22nd"), (113, "113th")],
)
def test_ordinals(number, text):
    assert page.ordinal(number) == text


def test_the_campaign_is_what_prove_printed(tmp_path):
    fault = {"name": "a GPU is missing", "check": "test_a.py::test_one", "vendor": "amd", "state": "caught"}
    document = {"planted": 2, "caught": 1, "healthy_runs": 3, "false_alarms": 0, "extra": 1}
    document["faults"] = [fault, fault | {"name": "NaN", "state": "missed"}]  # type: ignore[assignment]
    path = tmp_path / "faults.json"
    path.write_text(json.dumps(document))
    found = verb_files.load_campaign(path)
    assert (found.planted, found.caught) == (2, 1)
    assert [fault.state for fault in found.suites["test_a.py"]] == ["missed", "caught"]


def test_the_time_of_the_page_is_its_own():
    assert page.moment(NOW) in shown(dataclasses.replace(whole(), made=NOW)).text


# The library that the package carries, so that a page is made without a network: which one, unchanged.

ASSETS = files("stackcheck.report").joinpath("assets")
ROOT = Path(__file__).resolve().parents[3]


def text(name: str) -> str:
    return ASSETS.joinpath(name).read_text(encoding="utf-8")


def test_uplot_is_the_release_that_the_page_of_the_report_names():
    told = (ROOT / "docs" / "guides" / "report.md").read_text(encoding="utf-8")
    version = re.search(r"\(v([0-9.]+)\)", text("uPlot.iife.min.js"))
    assert version
    assert f"uPlot {version[1]}" in told
    for name in ("uPlot.iife.min.js", "uPlot.min.css"):
        digest = hashlib.sha256(ASSETS.joinpath(name).read_bytes()).hexdigest()
        assert digest in told, f"{name} has sha256 {digest}"


def test_its_licence_lies_beside_it_and_in_the_page():
    assert "MIT License" in text("uPlot.LICENSE")
    assert "Leon Sorokin" in text("uPlot.LICENSE")
    assert text("uPlot.LICENSE") in page.render(whole()).decode()


def test_every_asset_is_used_or_named():
    known = {*page.SCRIPTS, *page.STYLES, "page.html.j2", "grafana.json", "uPlot.LICENSE"}
    assert {item.name for item in ASSETS.iterdir()} == known
