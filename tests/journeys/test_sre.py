"""An SRE: images for a site, nights that tell people, the fleet in a terminal and on a wall."""

from __future__ import annotations

import json
import os
import re
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
import yaml

import browser as browsers
import loopback
import small_postgres
from host_locks import installed
from stackcheck.files import yamlfile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import Journey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="the sandbox of a unit needs root"),
]
STACK = "cpu-torch2.13.0-py3.11-debian12"
# As in test_nightly.py: without what takes most of the time.
LEFT_OUT = ("test_static.py", "test_training.py", "test_training_soak.py")
CHANGING = (  # what the host and the day decide
    (re.compile(r"\b([0-9a-f]{12,16}|[0-9a-f]{8})\b"), "<id>"),
    (re.compile(r"(?m)^.* \[ *\d+%\]\n"), ""),  # pytest's progress
    (re.compile(r"\b\d+:\d\d:\d\d old"), "<age> old"),
    (re.compile(r"\b\d+ min\b"), "<age>"),
    (re.compile(r"kernel [0-9]\S+"), "kernel <release>"),
    (re.compile(r" +"), " "),
)


class Hearer(BaseHTTPRequestHandler):
    """The webhook of a site: it keeps what it is told."""

    told: list[dict[str, Any]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.told.append(json.loads(body))
        self.send_response(204)
        self.end_headers()


@pytest.fixture
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    told: list[dict[str, Any]] = []
    with loopback.serving(Hearer, told=told) as host:
        yield f"http://{host}/hook", told


@pytest.fixture
def postgres() -> Iterator[str]:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    assert programs, "install the distribution's package postgresql"
    with small_postgres.server(programs[-1].parent) as address:
        yield address


def lay_out(journey: Journey, registry: str, postgres: str, hook: str) -> Path:
    """The SRE's checkout: its matrix names registry and database, and the suites are few."""
    own = journey.checkout(STACK)
    suites = own / "tests" / "acceptance"
    for file in suites.glob("test_*.py"):
        if file.name in LEFT_OUT:
            file.unlink()
    listing = json.loads((suites / "checks.json").read_text())
    for devices, checks in listing.items():
        listing[devices] = {
            name: tier for name, tier in checks.items() if name.split("::")[0] not in LEFT_OUT
        }
    (suites / "checks.json").write_text(json.dumps(listing))
    matrix = yamlfile.load_yaml(own / "matrix.yaml")
    matrix["publish"] = f"{registry}/site/stacks"
    matrix["history"] = {"records": str(journey.folder / "records"), "index": postgres}
    (own / "matrix.yaml").unlink()
    (own / "matrix.yaml").write_text(yaml.safe_dump(matrix, sort_keys=False))
    alerts = journey.folder / "alerts.yaml"
    alerts.write_text(yaml.safe_dump({"schema": 1, "when": "always", "webhooks": [{"url": hook}]}))
    alerts.chmod(0o600)
    return own


def test_the_terminal_of_an_sre(journey, registry, postgres, webhook, tmp_path):
    hook, told = webhook
    own = lay_out(journey, registry, postgres, hook)
    journey.changing = CHANGING
    stackcheck = "cd checkout && stackcheck -q"
    journey.types(f"{stackcheck} nightly alert --trial --alerts ../alerts.yaml")
    journey.types(f"{stackcheck} images {STACK} >/dev/null")
    journey.types(f"{stackcheck} nightly install --systemd --into ../units --alerts ../alerts.yaml")
    journey.types("as-the-unit units/stackcheck-nightly.service")
    journey.types(f"{stackcheck} nightly --alerts ../alerts.yaml")
    journey.types(f"{stackcheck} status")
    journey.types(f"{stackcheck} history")
    # The next night fails: a check of this host's suites is broken, so it is the image that is not trusted.
    file = own / "tests" / "acceptance" / "test_kernels.py"
    file.write_text(
        re.sub(r"(?m)^def test_gemm\(.*?\n(?=    )", r"\g<0>    assert dtype != 'fp32'\n", file.read_text())
    )
    journey.types(f"{stackcheck} nightly --force --alerts ../alerts.yaml", code=6)
    journey.types(f"{stackcheck} status")
    journey.types(f"{stackcheck} report --refresh 5m --out ../wall.html")
    journey.text += "# what the webhook heard\n" + "".join(
        journey.normal(f"{each['outcome']}, exit code {each['exit_code']}: {each['runbook']}\n")
        for each in told
    )
    with psycopg.connect(postgres.replace("+psycopg", "")) as connection:
        kept = connection.execute("SELECT status FROM runs ORDER BY started").fetchall()
    # A night that fails runs a second time before it says so.
    assert [status for (status,) in kept] == ["PASSED", "PASSED", "FAILED", "FAILED"]
    journey.text += on_the_wall(journey.folder / "wall.html", tmp_path)
    journey.is_as_in("sre.txt")


def on_the_wall(file: Path, tmp_path: Path) -> str:
    """What a real browser shows first, and that it asks for nothing."""
    with browsers.started(installed("chromium", "chromium"), tmp_path / "profile") as started:
        opened = browsers.opened(started, file, width=1280, height=900)
        assert opened.troubles() == []
        assert opened.requests() == [file.as_uri()]
        wall = opened.evaluate("document.querySelector('#wall .answer').innerText")
        row = opened.evaluate("document.querySelector('#wall tbody tr').className")
    return f"# the wall\n{wall}\n{row}\n"
