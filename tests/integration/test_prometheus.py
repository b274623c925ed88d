"""The text for Prometheus, the docs' alerts and the dashboard's queries, read by Prometheus' own tool."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_content import HOSTILE, HOUR, certified, image, point, run, whole
from small_stacks import ROOT
from stackcheck.report import prometheus

pytestmark = [pytest.mark.integration, pytest.mark.slow]

VARIABLE = re.compile(r"\$\{?\w+(?::\w+)?\}?")  # of Grafana, which puts its value there
ALERTS = re.compile(r"Useful alerts:(.*?)\.\s+If", re.DOTALL)


def says(promtool: Path, *arguments: str | Path, text: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [promtool, *arguments], input=text, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, done.stdout + done.stderr


def expressions(node: Any) -> Iterator[str]:
    """Every query of a dashboard."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "expr")
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from expressions(each)


def rules(queries: list[str]) -> str:
    named = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    return json.dumps({"groups": [{"name": "stackcheck", "rules": named}]})


def test_promtool_finds_nothing_wrong_in_the_metrics(promtool: Path) -> None:
    failed = run(HOUR, driver="31.40.1", status="FAILED", failed=("a",), simulated=True)
    odd, passed = run(2 * HOUR, stack=f'a"b\\c\nd {HOSTILE}'), run(3 * HOUR)
    text = prometheus.render(
        whole([failed, odd, passed], [image(certified(warned=("x",)))], [point(passed, 660)])
    )
    assert says(promtool, "check", "metrics", text=text) == (0, "")
    broken = text.replace("# TYPE stackcheck_certified gauge", "# TYPE stackcheck_certified number")
    assert says(promtool, "check", "metrics", text=broken)[0] != 0


def test_promtool_reads_the_alerts_and_the_queries_of_the_dashboard(promtool: Path, tmp_path: Path) -> None:
    told = ALERTS.search((ROOT / "docs" / "guides" / "report.md").read_text(encoding="utf-8"))
    assert told
    alerts = re.findall(r"`([^`]+)`", told[1])
    queries = [VARIABLE.sub("5m", query) for query in expressions(prometheus.dashboard())]
    assert (len(alerts), len(queries) > len(alerts)) == (4, True)
    file = tmp_path / "rules.json"
    file.write_text(rules(alerts + queries))
    assert says(promtool, "check", "rules", file)[0] == 0, says(promtool, "check", "rules", file)
    file.write_text(rules([*alerts, "rate(stackcheck_certified"]))
    assert says(promtool, "check", "rules", file)[0] != 0
