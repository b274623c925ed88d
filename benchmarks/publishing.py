"""Publishing under fire: kill, faults, races, tampering and fuzz, on a real registry, from a seed.

In: how many of each, and a seed. Out: one JSON document with figures; exit 1 if any outcome is wrong. After
everything the floating tag has to name a digest whose certificate verifies, the same command has to complete,
and nothing may be lost, or accepted though it was changed. `docs/reference/reliability.md` has the figures.

    .venv/bin/python benchmarks/publishing.py --seed 1 --workers 4 --record build/campaign.jsonl
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT = Path(__file__).resolve().parents[1]
PATHS = ("", "benchmarks", "tests/acceptance", "tests/unit/shared")
sys.path[:0] = [str(ROOT / name) for name in PATHS]

from fire.commands import Commands  # noqa: E402  # needs the path above
from fire.disturbed import registry  # noqa: E402  # needs the path above
from fire.record import Schedule, do_all, figures, lines_of  # noqa: E402  # needs the path above
from fire.tampering import fuzz, tampering  # noqa: E402  # needs the path above

from referrers_proxy import referrers_proxy  # noqa: E402  # needs the path above

PARTS = ("undisturbed", "boundary", "instant", "fault", "command", "disk", "race", "tampering", "fuzz")
UNDISTURBED = 20
FUZZ_SLICE_S = 20.0


def arguments_of(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--boundaries", type=int, help="kill at so many calls to the store; default: at all")
    parser.add_argument("--kills", type=int, default=200, help="kill at so many random instants")
    parser.add_argument("--schedules", type=int, default=1000, help="schedules of faults")
    parser.add_argument(
        "--commands", type=int, default=400, help="schedules of revoke, promote and renew on a registry"
    )
    parser.add_argument("--disks", type=int, default=600, help="of these, publish and gc on a failing disk")
    parser.add_argument("--races", type=int, default=20)
    parser.add_argument("--fuzz-s", type=float, default=600.0, help="processor seconds of fuzz")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="these parts; default: all")
    parser.add_argument("--workers", type=int, default=2, help="processes that share the work")
    parser.add_argument("--record", type=Path, help="one line for each schedule; a campaign goes on from it")
    parser.add_argument("--figures", action="store_true", help="do nothing; print what the record has")
    told = parser.parse_args(words)
    if told.figures and not told.record:
        parser.error("--figures needs --record")
    return told


def main(words: list[str]) -> int:
    told = arguments_of(words)
    lines = lines_of(told.record) if told.figures else campaign(told)
    found = {"seed": told.seed, **figures(lines, told.only)}
    found["wrong"] = [
        f"{line['part']} {line['number']}: {wrong}" for line in lines for wrong in line["wrong"]
    ]
    print(json.dumps(found, indent=2))
    return 1 if found["wrong"] else 0


def campaign(told: argparse.Namespace) -> list[dict[str, Any]]:
    """Do what the record lacks of these schedules; the lines of all of them."""
    with (
        tempfile.TemporaryDirectory(prefix="stackcheck-campaign-") as name,
        registry(Path(name, "registry")) as host,
        referrers_proxy(host) as referring,
        # What is on disk after a power cut is not the question here, and flushes take most of the time.
        mock.patch.object(os, "fsync"),
    ):
        os.environ["XDG_STATE_HOME"] = str(Path(name, "state"))
        record = told.record or Path(name, "record")
        fired = Commands(host, Path(name, "images"), told.seed, Path(name, "registry/data"), referring)
        schedules = schedules_of(told, fired.calls)
        do_all(schedules, lambda schedule: do(fired, schedule, told), record, told.workers)
        chosen = set(schedules)
        return [line for line in lines_of(record) if (line["part"], line["number"]) in chosen]


def schedules_of(told: argparse.Namespace, calls: int) -> list[Schedule]:
    """Each part's schedules by their numbers; the same seed gives the same ones."""
    chosen: Iterable[int] = range(1, calls + 1)
    if told.boundaries is not None and told.boundaries < calls:
        chosen = sorted(random.Random(told.seed).sample(chosen, told.boundaries))
    numbers: dict[str, Iterable[int]] = {
        "undisturbed": range(min(UNDISTURBED, told.schedules)),
        "boundary": chosen,
        "instant": range(told.kills),
        "fault": range(told.schedules),
        "command": range(told.commands),
        "disk": range(told.disks),
        "race": range(told.races),
        "tampering": range(1),
        "fuzz": range(math.ceil(told.fuzz_s / FUZZ_SLICE_S)),
    }
    return [(part, number) for part in told.only for number in numbers[part]]


def do(fired: Commands, schedule: Schedule, told: argparse.Namespace) -> dict[str, Any]:
    part, number = schedule
    fired.wrong = []
    folder = fired.folder / f"{part}-{number}"
    if part == "tampering":
        return tampering(folder, told.seed)
    if part == "fuzz":
        return fuzz(folder, told.seed, number, min(told.fuzz_s, FUZZ_SLICE_S))
    found: dict[str, Any] = getattr(fired, part)(number)
    print(f"{part} {number}: {fired.wrong or found}", file=sys.stderr, flush=True)
    return found | {"wrong": fired.wrong}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
