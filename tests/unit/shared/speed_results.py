"""Three results of a real run on an H200, which differ by one per cent, and the threshold of one metric."""

import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
METRIC = "copy_gb_per_s"
THRESHOLDS = Path("tests/acceptance/thresholds/nvidia/H200.json")


def write_three(root: Path) -> list[str]:
    """Write run0.json to run2.json and the suites' files into a checkout; the names of the results."""
    for part in ("harness", "vendors", "workloads", "thresholds", "devices.json"):
        source, target = ROOT / "tests/acceptance" / part, root / "tests/acceptance" / part
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    entries = json.loads((root / THRESHOLDS).read_text(encoding="utf-8"))["thresholds"]
    kept = [entry for entry in entries if entry["metric"] == METRIC]
    (root / THRESHOLDS).write_text(json.dumps({"thresholds": kept}), encoding="utf-8")
    text = (ROOT / "docs/results/suites-h200-x1-speed.json").read_text(encoding="utf-8")
    for number, factor in enumerate((0.99, 1.0, 1.01)):
        document = json.loads(text) | {"run_id": f"{number:032x}"}
        document["checks"] = [
            check for check in document["checks"] if METRIC in {metric["name"] for metric in check["metrics"]}
        ]
        for check in document["checks"]:
            check["metrics"] = [metric for metric in check["metrics"] if metric["name"] == METRIC]
            for metric in check["metrics"]:
                metric["value"] *= factor
        (root / f"run{number}.json").write_text(json.dumps(document))
    return [f"run{number}.json" for number in range(3)]
