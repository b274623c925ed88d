"""Time a history: append one run, rebuild the index, ask questions. Prints a table.

Usage: python benchmarks/history.py [--runs N] [--like RESULT.json] [--folder DIR] [--index URL]

Every run is simulated: RESULT.json (by default the committed gate on one H200: 203 checks, 48 metrics,
263 kB) with other ids, times, machines, drivers, stacks and values: 40 machines of three models, 10 stacks,
one run of each stack on each machine a night, a new driver every 60 nights, a failed check in one run of 50.
"""

from __future__ import annotations

import argparse
import copy
import datetime as dt
import hashlib
import json
import os
import random
import resource
import statistics
import struct
import tempfile
import time
import zlib
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from stackcheck.history import metrics, records
from stackcheck.history.history import History
from stackcheck.history.runs import Query
from stackcheck.oci.documents import sha256

ROOT = Path(__file__).parents[1]
LIKE = ROOT / "docs" / "results" / "suites-h200-x1-gate.json"
START = dt.datetime(2026, 1, 1, 1, tzinfo=dt.UTC)
NODES, STACKS = 40, 10
MODELS = ("H200", "MI300X", "MI325X")
LIMIT = 1000  # rows that a verb or the page asks for at most
WIDE = "*gemm*"
QUICKEST = 1  # of the levels of gzip
GZIP = b"\x1f\x8b\x08" + bytes(6) + b"\xff"  # the head of a member without a name and a time


def simulated(template: dict[str, Any], number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The result and the verdict of one run."""
    chance = random.Random(number)
    night, place = divmod(number, NODES * STACKS)
    node, stack = divmod(place, STACKS)
    started = START + dt.timedelta(days=night, seconds=place * 60)
    result = copy.copy(template)
    device = template["host"]["devices"][0] | {"model": MODELS[node % 3], "id": f"{node:016x}"}
    result |= {
        "run_id": f"{chance.getrandbits(128):032x}",
        "started": started.isoformat(),
        "finished": (started + dt.timedelta(seconds=380)).isoformat(),
        "stack_id": f"cuda13.{stack}-torch2.{stack + 3}.0-py3.12-ubuntu24.04",
        "host": template["host"] | {"devices": [device], "driver": f"580.{95 + night // 60}.{node % 2}"},
        "checks": [noisy(check, chance) for check in template["checks"]],
    }
    result["checks"] = result.pop("checks")  # the last member: `quick_record` adds to it
    failed = [result["checks"][chance.randrange(len(result["checks"]))]["id"]] if number % 50 == 0 else []
    reasons = [f"{check}: failed" for check in failed]
    status = "FAILED" if failed else "PASSED"
    return result, {"status": status, "reasons": reasons, "failed": failed, "warned": []}


def noisy(check: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    """A check with 0.4 % of noise on each number."""
    if not check["metrics"]:
        return check
    metrics = []
    for metric in check["metrics"]:
        repeats = [value * chance.gauss(1, 0.004) for value in metric["repeats"]]
        value = statistics.median(repeats) if repeats else metric["value"]
        metrics.append(metric | {"value": value, "repeats": repeats})
    return check | {"metrics": metrics}


def write(template: dict[str, Any], folder: str, first: int, last: int) -> int:
    """Write the records of some runs as `Records.append` would, without waiting for the disk each time.

    What every run shares is compressed once: a reader sees no difference, and 100,000 records take minutes
    instead of an hour.
    """
    same = [check for check in template["checks"] if not check["metrics"]]
    shared = b"," + b",".join(to_json(check) for check in same) + b"]}}"
    end = deflated(shared, zlib.Z_FINISH)
    part = template | {"checks": [check for check in template["checks"] if check["metrics"]]}
    for number in range(first, last):
        head, own = quick_record(*simulated(part, number), shared)
        data = member(head, deflated(head, zlib.Z_FINISH))
        data += member(own + shared, deflated(own, zlib.Z_FULL_FLUSH) + end)
        name = hashlib.sha256(data).hexdigest()
        path = Path(folder, name[:2], f"{name}.json.gz")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return last - first


def deflated(data: bytes, end: int) -> bytes:
    packer = zlib.compressobj(QUICKEST, wbits=-15)
    return packer.compress(data) + packer.flush(end)


def member(data: bytes, packed: bytes) -> bytes:
    """A member of a gzip file (RFC 1952), whose compressed data is there already."""
    return GZIP + packed + struct.pack("<II", zlib.crc32(data), len(data))


def quick_record(result: dict[str, Any], verdict: dict[str, Any], shared: bytes) -> tuple[bytes, bytes]:
    """`records.record`, unchecked, in two parts: the head, and the rest up to the checks that all share."""
    body = to_json(result)
    assert body.endswith(b"]}"), "`checks` is the last member"
    own = body[:-2]
    head = {
        "schema": records.SCHEMA,
        "source": "benchmark",
        "simulated": True,
        "judged": dt.datetime.fromisoformat(result["finished"]).isoformat(),
        "verdict": verdict,
        "fingerprint": None,
        "result_digest": sha256(own + shared[:-1]),
        "abstract": metrics.of(result),
    }
    data = records.joined(to_json(head), own)[:-1]
    cut = len(data) - len(own) - len(records.RESULT)
    return data[:cut], data[cut:]


def fill(template: dict[str, Any], folder: Path, runs: int) -> None:
    """All records, in all processes that this machine has."""
    step = 500
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        begun = [
            pool.submit(write, template, str(folder), first, min(first + step, runs))
            for first in range(0, runs, step)
        ]
        for each in begun:
            each.result()


def questions(metric: str, check: str) -> dict[str, Query]:
    """What the verbs and the page ask; the last ones are the worst that one can ask."""
    stack, recent = "cuda13.3-*", START + dt.timedelta(days=30)
    return {
        "newest 50 runs": Query(limit=50),
        "runs of a stack on a model with a driver": Query(
            stack=stack, device_model="H200", driver="580.95.0", limit=LIMIT
        ),
        "failed runs since a day": Query(status="FAILED", since=recent, limit=LIMIT),
        "runs in which a check failed": Query(check=check, limit=LIMIT),
        "runs that measured a metric": Query(metric=metric, limit=LIMIT),
        "runs that match nothing": Query(stack="no such stack", limit=LIMIT),
        "a metric of a stack on a machine": Query(
            metric=metric, check=check, stack=stack, node="*0*", limit=LIMIT
        ),
        "a metric of a stack on a model": Query(
            metric=metric, check=check, stack=stack, device_model="H200", limit=LIMIT
        ),
        "a metric of all runs, newest": Query(metric=metric, check=check, limit=LIMIT),
        "a metric that no driver matches": Query(metric=metric, check=check, driver="none", limit=LIMIT),
        f"all metrics like {WIDE}, newest": Query(metric=WIDE, limit=LIMIT),
        f"metrics like {WIDE} that no driver matches": Query(metric=WIDE, driver="none", limit=LIMIT),
        "all metrics of all checks, newest": Query(metric="*", limit=LIMIT),
    }


def slowest_of(repeats: int, ask: Any) -> tuple[float, float, int]:
    """The slowest of some calls in milliseconds, the most processor time of one, and how many rows came."""
    times, used, rows = [], [], 0
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        rows = len(ask())
        used.append((time.process_time() - cpu) * 1e3)
        times.append((time.perf_counter() - start) * 1e3)
    return max(times), max(used), rows


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--runs", type=int, default=100_000)
    options.add_argument("--like", type=Path, default=LIKE)
    options.add_argument("--folder", type=Path, help="keep the records here, and use those that are there")
    options.add_argument(
        "--questions-only", action="store_true", help="the index is there: do not rebuild it"
    )
    options.add_argument("--index", help="a database URL; default: SQLite beside the records")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        measure(chosen, chosen.folder or Path(temporary))


def measure(chosen: argparse.Namespace, folder: Path) -> None:
    template = json.loads(chosen.like.read_bytes())
    metrics = sum(len(check["metrics"]) for check in template["checks"])
    place = folder / "records"
    if not place.exists():
        fill(template, place, chosen.runs)
    history = History(str(place), chosen.index or f"sqlite:///{folder / 'index.sqlite'}")
    rows = []
    if not chosen.questions_only:
        start, cpu = time.perf_counter(), cpu_seconds()
        assert not history.rebuild()
        rebuilt = time.perf_counter() - start
        load = os.getloadavg()[0]
        used = f"{cpu_seconds() - cpu:.0f} s of processor time, load {load:.0f}, {peak_mb():.0f} MB at most"
        rows.append((f"rebuild of {chosen.runs} runs, {metrics} metrics each", f"{rebuilt:.1f} s", used))
    rows.append(
        (
            f"append one more run ({len(template['checks'])} checks)",
            *append_one(history, template, chosen.runs),
        )
    )
    check = next(check for check in template["checks"] if check["metrics"] and check["metrics"][0]["repeats"])
    for name, query in questions(f"{check['metrics'][0]['name']}*", check["id"]).items():
        asks_runs = "runs" in name.split("metric", maxsplit=1)[0]
        took, used, count = slowest_of(
            5, lambda q=query, f=history.runs if asks_runs else history.points: f(q)
        )
        rows.append((name, f"{took:.0f} ms", f"{used:.0f} ms of processor time, {count} rows"))
    sizes = [path.stat().st_size for path in place.rglob("*.gz")]
    rows.append(("records on disk", f"{sum(sizes) / 1e6:.0f} MB", f"{len(sizes)} files"))
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{os.cpu_count()} cores, load {load}; the slowest of 5 calls; at most {LIMIT} rows a question")
    for row in rows:
        print("  ".join((row[0].ljust(52), row[1].rjust(9), row[2])).rstrip())


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def peak_mb() -> float:
    """The most memory that this process, or one of its children, held."""
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return max(resource.getrusage(kind).ru_maxrss for kind in kinds) / 1e3


def append_one(history: History, template: dict[str, Any], number: int) -> tuple[str, str]:
    """Append one run; every other file has to stay as it is."""
    folder = Path(history.records.url)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*.gz")}
    result, verdict = simulated(template, number)
    start = time.perf_counter()
    history.append(json.dumps(result).encode(), verdict, None, source="benchmark", simulated=True)
    took = time.perf_counter() - start
    same = sum(path.stat().st_mtime_ns == written for path, written in before.items())
    assert same == len(before), "an append wrote to an old record"
    return f"{took * 1e3:.0f} ms", f"{same} old records untouched"


if __name__ == "__main__":
    main()
