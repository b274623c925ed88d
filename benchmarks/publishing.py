"""Publishing under fire: kill, faults, races, tampering and fuzz, on a real registry, from a seed.

In: how many of each, and a seed. Out: one JSON document with figures; exit 1 if any outcome is wrong. After
everything the floating tag has to name a digest whose certificate verifies, the same command has to complete,
and nothing may be lost, or accepted though it was changed. `docs/reliability.md` has the figures.

    .venv/bin/python benchmarks/publishing.py --seed 1 --kills 200 --schedules 1000 --races 20 --fuzz-s 600
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("", "benchmarks", "tests/acceptance", "tests/unit/shared")
sys.path[:0] = [str(ROOT / name) for name in PATHS]

from fire.disturbed import registry  # noqa: E402  # needs the path above
from fire.publishers import Campaign  # noqa: E402  # needs the path above
from fire.tampering import fuzz, tampering  # noqa: E402  # needs the path above

PARTS = ("kill", "faults", "races", "tampering", "fuzz")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boundaries", type=int, help="kill at so many step boundaries; default: at all")
    parser.add_argument("--kills", type=int, default=200, help="kill at so many random instants")
    parser.add_argument("--schedules", type=int, default=1000, help="schedules of faults")
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--fuzz-s", type=float, default=600.0, help="processor seconds of fuzz")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts; default: all")
    told = parser.parse_args(arguments)
    with (
        tempfile.TemporaryDirectory(prefix="stackcheck-campaign-") as name,
        registry(Path(name, "registry")) as host,
    ):
        os.environ["XDG_STATE_HOME"] = str(Path(name, "state"))
        campaign = Campaign(host, Path(name, "images"), told.seed)
        found: dict[str, Any] = {"seed": told.seed}
        for part, run in (
            ("kill", lambda: campaign.kills(told.kills, told.boundaries)),
            ("faults", lambda: campaign.faults(told.schedules)),
            ("races", lambda: campaign.races(told.races)),
            ("tampering", lambda: tampering(Path(name, "tampering"), told.seed)),
            ("fuzz", lambda: fuzz(Path(name, "fuzz"), told.seed, told.fuzz_s)),
        ):
            if part not in told.only:
                continue
            begin = time.monotonic()
            # What is on disk after a power cut is not the question here, and flushes take most of the time.
            with mock.patch.object(os, "fsync"):
                figures = run()
            found[part] = figures | {"seconds": round(time.monotonic() - begin, 1)}
            print(f"{part}: {found[part]}", file=sys.stderr, flush=True)
    of_parts = [wrong for part in told.only for wrong in found[part].pop("wrong", [])]
    found["wrong"] = [*campaign.wrong, *of_parts]
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
