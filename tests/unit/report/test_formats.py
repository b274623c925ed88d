"""Markdown, Prometheus' text and the Grafana dashboard say what the page says, in valid form."""

import re

import pytest

from report_content import HOSTILE, HOUR, STACK, certified, failed_detail, image, point, run, whole
from stackcheck.report import content, markdown, prometheus

_SAMPLE = re.compile(
    r'(?P<name>[a-z_]+)(?:\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\})? (?P<value>-?[0-9.e+]+)'
)


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Metric -> its samples; a line that is not of the format fails."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match, line
        labels = dict(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match["labels"] or ""))
        found.setdefault(match["name"], []).append((labels, float(match["value"])))
    return found


def a_content() -> content.Content:
    failed = run(HOUR, driver="31.40.1", status="FAILED", failed=("a",), simulated=True)
    passed = run(3 * HOUR)
    return whole(
        [failed, passed], [image(certified(warned=("x",)))], [point(passed, 660), point(failed, 540)]
    )


def test_prometheus_has_help_type_and_samples_of_each_metric_together():
    text = prometheus.render(a_content())
    assert text.endswith("\n")
    found = samples(text)
    assert set(found) == set(prometheus.HELP)
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert names == list(prometheus.HELP)


def test_prometheus_says_certified_and_margin_with_simulated_apart():
    found = samples(prometheus.render(a_content()))
    certified_by = {labels["driver"]: value for labels, value in found["stackcheck_certified"]}
    assert certified_by == {"30.30.3": 1, "31.40.1": 0}
    ((labels, margin),) = found["stackcheck_metric_margin_ratio"]
    assert margin == pytest.approx(-0.1)
    assert labels["simulated"] == "true"
    statuses = {
        (labels["driver"], labels["status"]): value for labels, value in found["stackcheck_run_status"]
    }
    assert statuses["31.40.1", "FAILED"] == 1
    assert statuses["31.40.1", "PASSED"] == 0


def test_prometheus_escapes_names():
    found = samples(prometheus.render(whole([run(stack='a"b\\c\nd')])))
    assert found["stackcheck_run_time_seconds"][0][0]["stack"] == r"a\"b\\c\nd"


def test_unknown_certificates_are_no_zero_in_prometheus():
    offered = content.Offered(target="x", problem="gone")
    found = samples(prometheus.render(whole([run()], offered=offered)))
    assert found["stackcheck_published_known"] == [({}, 0)]
    assert "stackcheck_certified" not in found


def test_the_dashboard_asks_only_for_figures_that_exist():
    board = prometheus.dashboard()
    asked = set(re.findall(r"\bstackcheck_[a-z_]+", str([panel["targets"] for panel in board["panels"]])))
    asked |= set(re.findall(r"\bstackcheck_[a-z_]+", str(board["templating"])))
    assert asked <= set(prometheus.HELP)
    assert {"stackcheck_certified", "stackcheck_run_status", "stackcheck_metric_margin_ratio"} <= asked


def test_the_dashboard_has_the_structure_that_grafana_imports():
    board = prometheus.dashboard()
    assert {"title", "uid", "schemaVersion", "panels", "templating", "time"} <= set(board)
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {item["name"] for item in board["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z_]+)\}?", str(board["panels"])))
    assert used == variables
    for panel in board["panels"]:
        assert {"title", "type", "gridPos", "targets", "datasource", "description"} <= set(panel)
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24


def test_no_panel_lies_on_another():
    cells = set()
    for panel in prometheus.dashboard()["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        cells |= mine


def test_markdown_answers_in_the_same_order():
    text = markdown.render(a_content())
    order = [text.index(words) for words in ("# What is certified", "# What failed last night", "# How fast")]
    assert order == sorted(order)
    assert f"**{markdown.escaped(STACK)}**" in text
    assert "Do not roll out driver 31.40.1" in text
    assert "*(simulated)*" in text
    assert "-10.0%" in text
    assert "on 8 x MI300X, driver 31.40.1" in text


def test_markdown_tells_equal_names_of_two_checks_apart_and_says_sizes_as_people_do():
    passed = run(HOUR)
    names = {"a.py::test_speed[bf16]": "busbw[bytes=268435456 #2]", "a.py::test_speed[fp8]": "gemm_tflops"}
    points = [point(passed, 660, check=check, name=name) for check, name in names.items()]
    text = markdown.render(whole([passed], points=points))
    assert "| busbw\\[256 MiB \\#2\\] | test\\_speed\\[bf16\\] | 660" in text
    assert "| gemm\\_tflops | test\\_speed\\[fp8\\] | 660" in text


def test_markdown_names_the_failed_check_and_why():
    failed = run(HOUR, status="FAILED")
    text = markdown.render(
        whole([failed], details={failed.record: failed_detail("test_a.py::test_nan", "dq is nan")})
    )
    assert "test\\_a.py::test\\_nan: dq is nan" in text


def test_markdown_says_how_many_reasons_it_leaves_out():
    text = markdown.render(whole([run(HOUR, status="FAILED", reasons=tuple("abcde"))]))
    assert text.count("\n  - and 2 more") == 1


def test_markdown_says_a_missing_night_and_unknown_certificates():
    offered = content.Offered(target="x", problem="gone")
    text = markdown.render(whole([run(30 * HOUR)], offered=offered))
    assert "No run in the last 24 hours" in text
    assert "It is not known what is certified" in text


def test_markdown_escapes_what_could_be_markup():
    failed = run(HOUR, stack=HOSTILE, status="FAILED", reasons=(f"{HOSTILE}\n| a | b |",))
    text = markdown.render(whole([failed]))
    assert "<script" not in text.replace("\\<", "")
    assert "\n| a | b |" not in text


def test_markdown_tables_have_a_cell_for_each_column():
    rows = [line for line in markdown.render(a_content()).splitlines() if line.startswith("|")]
    assert (
        len({row.count(" |") for row in rows if "Stack" in row or "not run" in row or "certified" in row})
        == 1
    )
