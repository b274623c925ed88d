"""The text for Prometheus, the alerts of the docs and the dashboard, as Prometheus and Grafana read them."""

import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from report_content import HOSTILE, HOUR, certified, image, point, run, whole
from small_stacks import ROOT
from stackcheck.report import prometheus
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

VARIABLE = re.compile(r"\$\{?\w+(?::\w+)?\}?")  # of Grafana, which puts its value there
ALERTS = re.compile(r"Useful alerts:(.*?)\.\s+If", re.DOTALL)


def says(promtool: Path, *arguments: str | Path, text: str = "") -> tuple[int, str]:
    done = run_program([promtool, *arguments], input=text, timeout=300)
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


def test_promtool_finds_nothing_wrong_in_the_metrics(promtool):
    failed = run(HOUR, driver="31.40.1", status="FAILED", failed=("a",), simulated=True)
    odd, passed = run(2 * HOUR, stack=f'a"b\\c\nd {HOSTILE}'), run(3 * HOUR)
    text = prometheus.render(
        whole([failed, odd, passed], [image(certified(warned=("x",)))], [point(passed, 660)])
    )
    assert says(promtool, "check", "metrics", text=text) == (0, "")
    broken = text.replace("# TYPE stackcheck_certified gauge", "# TYPE stackcheck_certified number")
    assert says(promtool, "check", "metrics", text=broken)[0] != 0


def test_promtool_reads_the_alerts_and_the_queries_of_the_dashboard(promtool, tmp_path):
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


PACKAGE = "grafana-foundation-sdk==1769699998!10.1.0"
DASHBOARD = ROOT / "stackcheck" / "report" / "assets" / "grafana.json"
# Grafana writes it into what it exports, and its types leave it out.
EXPORTED = ("/templating/list/1/definition", "/templating/list/2/definition", "/templating/list/3/definition")
PROGRAM = """
import json, sys
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard
plugins.register_default_plugins()
print(JSONEncoder().encode(Dashboard.from_json(json.load(sys.stdin))))
"""


@pytest.fixture(scope="module")
def types(tmp_path_factory) -> Path:
    """A folder with Grafana's types for Python."""
    folder = tmp_path_factory.mktemp("grafana")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        PACKAGE,
    ]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def lost(given: object, kept: object, place: str = "") -> list[str]:
    """The places of what one document has and the other has not, or has otherwise."""
    if isinstance(given, dict):
        other = kept if isinstance(kept, dict) else {}
        missing = [f"{place}/{name}" for name in given if name not in other]
        return missing + [
            each
            for name in given
            if name in other
            for each in lost(given[name], other[name], f"{place}/{name}")
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        pairs = enumerate(zip(given, kept, strict=True))
        return [each for at, (a, b) in pairs for each in lost(a, b, f"{place}/{at}")]
    return [] if given == kept else [place]


def through(types: Path, document: object) -> object:
    """A dashboard, read and written by Grafana's types."""
    done = run_program(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(document),
        env=os.environ | {"PYTHONPATH": str(types)},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_grafana_knows_every_field_of_the_dashboard(types):
    document = json.loads(DASHBOARD.read_text())
    assert lost(document, through(types, document)) == [*EXPORTED]
    document["panels"][0]["fieldConfig"]["defaults"]["untit"] = "s"  # the test can fail
    document["tagss"] = []
    assert set(lost(document, through(types, document))) == {
        *EXPORTED,
        "/panels/0/fieldConfig/defaults/untit",
        "/tagss",
    }
