"""tests/acceptance/checks.json lists exactly the checks that the suites collect: the host knows them before a
run. `make lists` writes it anew after a check was added, renamed or removed.
"""

import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
FILE = TESTS / "acceptance" / "checks.json"
COUNTS = (1, 2, 3, 4, 5, 6, 7, 8)
WANTED = [("cpu", 1), ("amd", 2), *(("nvidia", count) for count in COUNTS)]
TIMEOUT_S = 300
Tiers = dict[str, str]


# One process for all: importing torch takes longer than collecting.
PROGRAM = """
import gc, json, sys
import pytest

class Scopes:
    def pytest_collection_finish(self, session):
        from harness import order, records
        from harness.session import session_of
        count = session_of(session.config).device_count
        kinds = {
            (order.scope(item.nodeid, count), order.phase(item), order.wish(item).use)
            for item in session.items
            if order.devices(item)
        }
        print("scopes", json.dumps(sorted(kinds)))
        marked = [records.check_id(i.nodeid) for i in session.items if i.get_closest_marker(order.GATE)]
        print("gate", json.dumps(sorted(marked)))
        stages = {(order.scope(item.nodeid, count), order.stage(item, count)) for item in session.items}
        print("stages", json.dumps(sorted(stages)))

for arguments in json.loads(sys.argv[1]):
    pytest.main(arguments, plugins=[Scopes()])
    gc.freeze()  # torch is loaded now: pytest looks for garbage many times at each end
"""


@functools.cache
def listed() -> str:
    """What pytest prints while it collects the checks of each vendor and device count."""
    calls = [
        [
            *(str(TESTS), f"--gpu-vendor={vendor}", "--tier=soak", f"--list-checks={count}", "-q"),
            "--assert=plain",  # nothing runs: rewriting the asserts ten times would take half of the time
        ]
        for vendor, count in WANTED
    ]
    command = [sys.executable, "-c", PROGRAM, json.dumps(calls)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert ended.stdout.count("scopes") == len(WANTED), ended.stdout[-2000:] + ended.stderr[-2000:]
    return ended.stdout


@functools.cache
def collected() -> dict[str, Tiers]:
    """Vendor and device count -> check id -> the first tier that runs it, as pytest collects them."""
    listings = re.findall(r"^\{$.*?^\}$", listed(), re.MULTILINE | re.DOTALL)
    return {
        f"{vendor} {count}": json.loads(text) for (vendor, count), text in zip(WANTED, listings, strict=True)
    }


def listing() -> dict[str, Tiers]:
    """`every`: checks of any machine. `cpu`, `1`, `2`, …: more of a processor, or of so many GPUs.
    `gate`: those of all machines that a gate runs.
    """
    of = collected()
    found = {"cpu": of["cpu 1"], **{str(count): of[f"nvidia {count}"] for count in COUNTS}}
    every = set.intersection(*(set(tiers) for tiers in found.values()))
    common = {name: found["cpu"][name] for name in sorted(every)}
    return {"every": common, "gate": gate(found.values())} | {
        key: {name: tier for name, tier in tiers.items() if name not in every} for key, tiers in found.items()
    }


def gate(found: Iterable[Tiers]) -> Tiers:
    """The checks that a gate runs, of every machine."""
    marked = {
        name for line in re.findall(r"^gate (.*)$", listed(), re.MULTILINE) for name in json.loads(line)
    }
    tiers = {name: tier for each in found for name, tier in each.items()}
    return {name: tiers[name] for name in sorted(marked)}


def test_the_committed_list_is_what_the_suites_collect():
    text = json.dumps(listing(), indent=1, sort_keys=True) + "\n"
    assert importlib.util.find_spec("torch"), (
        "without torch the suites collect fewer checks: run it in an image"
    )
    if os.environ.get("STACKCHECK_WRITE_CHECKS"):
        FILE.write_text(text, encoding="utf-8")
    assert FILE.read_text(encoding="utf-8") == text, f"{FILE} is out of date: make lists"


def test_both_gpu_vendors_have_the_same_checks():
    assert collected()["amd 2"] == collected()["nvidia 2"]


def test_no_worker_keeps_a_check_without_a_device_behind_one_that_waits_for_it():
    lines = re.findall(r"^stages (.*)$", listed(), re.MULTILINE)
    assert len(lines) == len(WANTED)
    for line in lines:
        scopes = [scope for scope, _ in json.loads(line)]
        assert len(scopes) == len(set(scopes)), "checks of several stages, to name in order.SPEED or WHOLE"


def test_no_worker_keeps_a_check_behind_one_that_waits_for_it():
    lines = re.findall(r"^scopes (.*)$", listed(), re.MULTILINE)
    assert len(lines) == len(WANTED)
    for line in lines:
        kinds: dict[str, list[tuple[int, str]]] = {}
        for scope, phase, use in json.loads(line):
            kinds.setdefault(scope, []).append((phase, use))
        mixed = {scope: found for scope, found in kinds.items() if len(found) > 1}
        assert not mixed, f"checks of several phases or uses, to name in order.SPEED or WHOLE: {mixed}"
