"""What others measured, on the page: the medians of signed bundles, and nothing of a wrong one."""

import json
import shutil
from pathlib import Path

import pytest

from report_content import HOSTILE, run, whole
from small_checkout import call
from stackcheck.errors import CertificateError, ChecksFailedError
from stackcheck.proof import contribution
from stackcheck.report import others, page

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


def test_a_model_has_the_median_of_its_own_bundles() -> None:
    given = [bundle("A", "k1", "2026-01-03", 1.0), bundle("A", "k2", "2026-01-01", 2.0)]
    given += [bundle("A", "k2", "2026-01-02", 9.0), bundle("B", "k1", "2026-01-09", 100.0)]
    made = others.of_model(given, "A")
    assert (made.bundles, made.contributors, made.passed) == (3, 2, 3)
    assert made.days == ("2026-01-01", "2026-01-03")
    (figure,) = made.figures
    assert (figure.conditions, figure.median, figure.unit, figure.runs) == ("m=8192", 2.0, "TFLOP/s", 3)


def test_the_page_has_one_table_a_model_and_opens_that_of_the_first_machine() -> None:
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
def test_the_committed_bundles_come_to_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_wrong_bundle_stops_the_report(tmp_path: Path, damage: str) -> None:
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
