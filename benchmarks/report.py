"""Make the demonstration page, and time what a reader and an operator wait for.

    python benchmarks/report.py FOLDER [RESULT.json …]

Writes into FOLDER a history of the committed runs of H200s, of the named results, and of sixty simulated
nights; a layout with certified images; and report.html. The simulated runs are marked on the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import subprocess
import sys
import time
from pathlib import Path

from stackcheck.certificate import keys
from stackcheck.history.history import History

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "unit" / "shared"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the history, the images and the page go")
    parser.add_argument("results", nargs="*", type=Path, help="result.json of runs that the history has too")
    given = parser.parse_args()
    import demo_dist
    import demo_history
    from small_images import new_key

    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    now = dt.datetime.now(dt.UTC).replace(microsecond=0)
    start = time.monotonic()
    history = History(str(folder / "records"), f"sqlite:///{folder / 'index.sqlite'}")
    demo_history.fill(history, now, given.results)
    key = new_key()
    (folder / "demo.pub").write_bytes(keys.public_pem(key.public_key()))
    demo_dist.publish_all(folder, key, now)
    print(f"made the history in {time.monotonic() - start:.1f} s")
    start = time.monotonic()
    command = [str(ROOT / ".venv" / "bin" / "stackcheck"), "report", "--out", str(folder / "report.html")]
    command += ["--history", ".", "--from", "oci:dist", "--key", "demo.pub"]
    command += ["--root", str(ROOT), "--machine", "MI300X/30.30.3"]
    subprocess.run(command, check=True, cwd=folder)
    size = (folder / "report.html").stat().st_size
    print(f"wrote report.html in {time.monotonic() - start:.1f} s: {size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
