"""The dashboard against Grafana's own types: what they do not know, Grafana would ignore.

Grafana's server is in no package index of Debian, pip or npm, so it is not started here.
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from small_stacks import ROOT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

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
def types(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(document),
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(types)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_grafana_knows_every_field_of_the_dashboard(types: Path) -> None:
    document = json.loads(DASHBOARD.read_text())
    assert lost(document, through(types, document)) == [*EXPORTED]
    document["panels"][0]["fieldConfig"]["defaults"]["untit"] = "s"  # the test can fail
    document["tagss"] = []
    assert set(lost(document, through(types, document))) == {
        *EXPORTED,
        "/panels/0/fieldConfig/defaults/untit",
        "/tagss",
    }
