"""The page that a run of the suites leaves beside its result: what it says, and that it trusts no text."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import result_files
from harness import page

ROOT = Path(__file__).resolve().parents[3]
HOSTILE = "</pre></details><script>alert(1)</script>$title <img src=x onerror=alert(2)>\"'&"


def tags(text: str) -> list[str]:
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            assert not [name for name, _ in attrs if name.startswith("on")]
            found.append(tag)

    Reader().feed(text)
    return found


def shown(*checks: dict[str, Any], **changes: Any) -> str:
    return page.render(result_files.result(*checks, **changes), Path("/results"), "H200", 2)


def test_a_run_that_passed_says_how_many_checks_passed():
    text = shown(result_files.check("test_a.py::test_one"), image=None)
    assert "1 of 1 checks passed, none failed." in text
    assert "stackcheck judge /results/result.json" in text


def test_a_failure_is_shown_with_what_it_proves_and_why():
    text = shown(result_files.check("test_a.py::test_one", "failed", reason="dq is nan", doc="It is right."))
    assert "1 of 1 checks did not pass." in text
    for words in ("Proves: It is right.", "dq is nan", "test_a.py::test_one"):
        assert words in text


def test_a_long_failure_leaves_the_figures_in_reach_and_says_what_it_leaves_out():
    reason = "\n".join(f"case {number}" for number in range(30))
    text = shown(result_files.check("test_a.py::test_one", "failed", reason=reason))
    assert ("case 11\n… 18 more lines in result.json" in text, "case 12" in text) == (True, False)


def test_times_are_said_to_the_second():
    text = shown(started="2026-11-22T05:44:46.441+00:00", finished=None)
    assert "<dt>started</dt><dd>2026-11-22 05:44:46 UTC</dd><dt>ended</dt><dd>never</dd>" in text


@pytest.mark.parametrize("outcome", ["failed", "error", "invalid"])
def test_every_bad_outcome_is_shown_as_bad(outcome):
    text = shown(result_files.check("test_a.py::test_one", outcome))
    assert page.BAD[outcome] in text
    assert "none failed" not in text


def test_a_run_that_did_not_end_never_reads_as_passed():
    text = shown(result_files.check("test_a.py::test_one"), state="crashed", finished=None)
    assert "did not end (crashed)" in text
    assert "none failed" not in text


def test_a_run_without_a_pass_never_reads_as_passed():
    assert "No check passed." in shown(result_files.check("test_a.py::test_one", "skipped", reason="no GPU"))
    assert "No check passed." in shown()


def test_a_figure_outside_of_its_bound_is_named_so():
    metric = result_files.metric("gemm_tflops", 4.0, verdict="fail", ceiling=9.0)
    text = shown(result_files.check("test_a.py::test_one", "failed", metrics=[metric]))
    assert "✘ outside" in text
    assert "≥ 5" in text


def test_the_machine_meanwhile_is_shown():
    during = {"clock_mhz_median": 1965, "power_w_max": 695.9, "temperature_c_max": None, "throttle": ["idle"]}
    evidence = {"before": {}, "after": {"during": during}}
    text = shown(result_files.check("test_a.py::test_one", evidence=evidence))
    assert "The machine meanwhile" in text
    assert "1965" in text
    assert "idle" in text


def test_hostile_text_of_an_image_stays_text():
    def of(name: str) -> str:
        during = {"clock_mhz_median": name, "throttle": [name]}
        bad = result_files.check(
            name,
            "failed",
            reason=name,
            doc=name,
            metrics=[result_files.metric(name, unit=name)],
            evidence={"before": {}, "after": {"during": during}},
        )
        skipped = result_files.check(f"{name}2", "skipped", reason=name)
        return shown(bad, skipped, stack_id=name, software={name: name})

    assert tags(of(HOSTILE)) == tags(of("plain"))
    assert "script" not in tags(of(HOSTILE))


def test_the_page_of_a_committed_run_is_written_whole_beside_it(tmp_path):
    result = json.loads((ROOT / "docs/results/suites-h200-x2-standard.json").read_text())
    path = page.write(result, tmp_path, "H200", 2)
    assert path == tmp_path / "report.html"
    text = path.read_text()
    assert text.rstrip().endswith("</html>")
    assert "7 of 237 checks did not pass." in text
    assert [item.name for item in tmp_path.iterdir()] == ["report.html"]
    assert "http:" not in text
    assert "https:" not in text
