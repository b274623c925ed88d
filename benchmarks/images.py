"""Time the main job as a user meets it, on a clean clone: each row is one whole process.

In: nothing but this checkout (committed state). Out: a table of seconds beside the figure aimed at.
Run: python3 benchmarks/images.py [--keep]. The first row includes the engine when the host has none.
`--stored` times nothing: for each runtime version, what the images that were built in this checkout take in a
store, beside the largest of them (run it with .venv/bin/python). What can be reached:
docs/guides/building.md.
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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stackcheck.imaging.image import Image

ROOT = Path(__file__).resolve().parents[1]
LIST_REPEATS = 7
STORED_AIM = 1.2


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--keep", action="store_true", help="leave the clone where it is")
    arguments.add_argument(
        "--stored", action="store_true", help="bytes of the images built here, and no time"
    )
    options = arguments.parse_args()
    if options.stored:
        show_stored()
        return
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


def show_stored() -> None:
    """A row a runtime version: bytes of all its images, bytes that a store needs, and their ratio."""
    from stackcheck.imaging import build

    groups: dict[str, list[Image]] = {}
    for image in build.recorded(ROOT / "build", ROOT):
        groups.setdefault((image.stack_id or "elsewhere").split("-")[0], []).append(image)
    print(
        f"{'runtime':16}{'images':>8}{'sum GB':>10}{'stored GB':>11}{'largest GB':>12}{'ratio':>8}{'aim':>8}"
    )
    for name, images in sorted(groups.items()):
        total = sum(image.size_bytes for image in images)
        stored = build.stored_bytes(images)
        largest = max(image.size_bytes for image in images)
        sizes = f"{total / 1e9:10.2f}{stored / 1e9:11.2f}{largest / 1e9:12.2f}"
        print(f"{name:16}{len(images):8}{sizes}{stored / largest:8.2f}{STORED_AIM:8.2f}")


def timed(command: list[str], cwd: Path) -> float:
    """Wall seconds of a command that has to succeed; its output goes to stderr."""
    start = time.monotonic()
    subprocess.run(command, cwd=cwd, check=True, stdout=sys.stderr, stdin=subprocess.DEVNULL)
    return time.monotonic() - start


if __name__ == "__main__":
    main()
