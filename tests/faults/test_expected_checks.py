"""tests/acceptance/checks.json lists exactly the checks that the suites collect: the host knows them before a
run. To write it anew after a check was added, renamed or removed:

    STACKCHECK_WRITE_CHECKS=1 python -m pytest tests/faults/test_expected_checks.py
"""

import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILE = TESTS / "acceptance" / "checks.json"
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8)
TIMEOUT_S = 300
Tiers = dict[str, str]


# One process for all: importing torch takes longer than collecting.
PROGRAM = "import json, pytest, sys; [pytest.main(arguments) for arguments in json.loads(sys.argv[1])]"


@functools.cache
def collected() -> dict[str, Tiers]:
    """Vendor and device count -> check id -> the first tier that runs it, as pytest collects them."""
    wanted = [("cpu", 1), ("amd", 2), *(("nvidia", count) for count in COUNTS)]
    calls = [
        [str(TESTS), f"--gpu-vendor={vendor}", "--tier=soak", f"--list-checks={count}", "-q"]
        for vendor, count in wanted
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(calls)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    listings = re.findall(r"^\{$.*?^\}$", ended.stdout, re.MULTILINE | re.DOTALL)
    assert len(listings) == len(wanted), ended.stdout[-2000:] + ended.stderr[-2000:]
    return {
        f"{vendor} {count}": json.loads(text) for (vendor, count), text in zip(wanted, listings, strict=True)
    }


def listing() -> dict[str, Tiers]:
    """`every`: checks of any machine. `cpu`, `1`, `2`, …: more of a processor, or of so many GPUs."""
    listed = collected()
    found = {"cpu": listed["cpu 1"], **{str(count): listed[f"nvidia {count}"] for count in COUNTS}}
    every = set.intersection(*(set(tiers) for tiers in found.values()))
    common = {name: found["cpu"][name] for name in sorted(every)}
    return {"every": common} | {
        key: {name: tier for name, tier in tiers.items() if name not in every} for key, tiers in found.items()
    }


def test_the_committed_list_is_what_the_suites_collect() -> None:
    text = json.dumps(listing(), indent=1, sort_keys=True) + "\n"
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        FILE.write_text(text, encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == text, f"{FILE} is out of date: see the top of this file"


def test_both_gpu_vendors_have_the_same_checks() -> None:
    assert collected()["amd 2"] == collected()["nvidia 2"]
