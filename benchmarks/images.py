"""Time the main job as a user meets it, on a clean clone: each row is one whole process.

In: nothing but this checkout (committed state). Out: a table of seconds beside the figure aimed at.
Run: python3 benchmarks/images.py [--keep]. The first row includes the engine when the host has none.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIST_REPEATS = 7


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", action="store_true", help="leave the clone where it is")
    options = arguments.parse_args()
    clone = Path(tempfile.mkdtemp(prefix="stackcheck-benchmark-")) / "stackcheck"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    rows = measure(clone)
    print(f"\n{os.cpu_count()} cores, {platform.platform()}, python {platform.python_version()}")
    print(f"{'step':44}{'seconds':>10}{'aim':>8}")
    for step, seconds, aim in rows:
        print(f"{step:44}{seconds:10.2f}{aim:8.2f}")
    if not options.keep:
        shutil.rmtree(clone.parent)


def measure(clone: Path) -> list[tuple[str, float, float]]:
    """Every row, in the order a user would meet them."""
    rows = [("first `make images`", timed(["make", "images"], clone), 360.0)]
    rows.append(("second, nothing changed", timed(["make", "images"], clone), 5.0))
    with (clone / "tests/acceptance/test_image.py").open("a", encoding="utf-8") as file:
        file.write("\n")
    rows.append(("one acceptance test changed", timed(["make", "images"], clone), 60.0))
    tool = str(clone / ".venv/bin/stackcheck")
    stack = next(path.name for path in (clone / "build").iterdir() if path.name.startswith("cpu-"))
    lists = sorted(timed([tool, "list"], clone) for _ in range(LIST_REPEATS))
    rows.append((f"stackcheck list (median of {LIST_REPEATS})", lists[LIST_REPEATS // 2], 0.3))
    rows.append(("stackcheck verify oci:dist", timed([tool, "verify", f"oci:dist:{stack}"], clone), 1.0))
    return rows


def timed(command: list[str], cwd: Path) -> float:
    """Wall seconds of a command that has to succeed; its output goes to stderr."""
    start = time.monotonic()
    subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
