"""`stackcheck judge` gives this checkout's verdict on any result, and says what it did not compare."""

import json
from pathlib import Path

from small_checkout import ROOT
from stackcheck.suite.judgement import judge_file


def test_a_run_with_other_thresholds_is_held_to_the_bounds_of_this_checkout(tmp_path: Path) -> None:
    """Its own bounds differ by right, so they say nothing; its figures do."""
    document = json.loads((ROOT / "docs" / "results" / "suites-h100-x1-standard.json").read_text())
    path = tmp_path / "result.json"
    for check in document["checks"]:
        for metric in check["metrics"]:
            if metric["name"] == "copy_gb_per_s" and metric["verdict"] == "pass":
                metric |= {"value": 2600.0, "bound": 2402.0}  # over the run's bound, under the one here
    path.write_text(json.dumps(document))
    found = judge_file(path, ROOT, None)
    (reason,) = [reason for reason in found.verdict.reasons if "copy_gb_per_s" in reason]
    assert "copy_gb_per_s 2600.0 GB/s violates" in reason
    assert any(line.startswith("the thresholds: the run used others") for line in found.not_compared)
