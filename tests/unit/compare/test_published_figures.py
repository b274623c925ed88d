"""The founding documents' figures beside ours: read, compared, and on the page."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

import report_content
from small_checkout import call
from stackcheck.compare import published_figures
from stackcheck.errors import ConfigurationError
from stackcheck.report import markdown, page

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

ROWS = """
amd-container:
  title: "AMD, training container"
  defaults: {count: 8, metric: tflops_noncausal, unit: TFLOP/s/GPU, convention: noncausal}
  jobs: {llama-8b: "--model llama"}
  rows:
    - {id: mi300x-8b, device: MI300X, precision: bf16, value: 500, source: Table 1}
    - {id: a-figure-without-a-number, device: MI300X, value: null, source: Figure 3}
    - {id: mi325x-8b, device: MI325X, value: [590, 610], source: Table 2}
"""
LINE = {
    "document": "amd-container",
    "row": "mi300x-8b",
    "machine": "H200",
    "ranks": 2,
    "ours": 620.0,
    "how": "fsdp2",
    "published": 500,
}


@pytest.fixture
def checkout(small_checkout: Path) -> Path:
    (small_checkout / "trainers" / "rows.yaml").write_text(ROWS)
    (small_checkout / "build" / "rows").mkdir(parents=True)
    refused = {**LINE, "row": "mi325x-8b", "ours": None, "how": None, "reason": "needs <8> devices"}
    lines = [json.dumps(each) for each in ({**LINE, "ours": 1.0}, LINE, refused)]
    (small_checkout / "build" / "rows" / "amd.jsonl").write_text("\n".join(lines) + "\n")
    return small_checkout


def test_rows_are_compared_with_ours_and_with_each_other(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = call(capsys, "compare", "row:mi300x-8b", "ours:amd-container/mi300x-8b", "--json")
    assert done.code == 0, done.err
    (metric,) = json.loads(done.out)["metrics"]
    assert (metric["a"], metric["b"], metric["ratio"], metric["verdict"]) == (500, 620, 1.24, "better")
    done = call(capsys, "compare", "row:mi300x-8b", "row:mi325x-8b", "--json")
    assert json.loads(done.out)["metrics"][0]["ratio"] == 1.2  # the middle of the range
    done = call(capsys, "compare", "row:mi325x-8b", "ours:mi325x-8b")
    assert done.code == 3
    assert "H200 x2: needs <8> devices" in done.err
    assert call(capsys, "compare", "row:nosuch", "row:mi325x-8b").code == 3
    (checkout / "build" / "rows" / "bad.jsonl").write_text('{"document": 1}\n')
    with pytest.raises(ConfigurationError, match="damaged"):
        published_figures.load(checkout)


def test_the_page_has_every_row_and_our_figure_beside_it(checkout: Path, tmp_path: Path) -> None:
    assert published_figures.load(tmp_path) == ()
    made = report_content.whole(founding=published_figures.load(checkout))
    text = page.render(made).decode()
    assert "<strong>2 of 3 rows</strong> were tried here" in text
    assert '<td class="number" data-label="ratio">1.24</td>' in text
    assert "needs &lt;8&gt; devices" in text
    assert "| amd-container/mi300x-8b | MI300X x8, bf16 | 500 | H200 x2 | 620 | 1.24 | TFLOP/s/GPU |" in (
        markdown.render(made)
    )
    assert "founding" not in page.render(report_content.whole()).decode().split("</style>")[1]
