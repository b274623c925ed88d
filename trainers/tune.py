"""Find the fastest microbatch, each candidate in fresh processes; out of memory is an answer, not a failure.

    python trainers/tune.py --nproc-per-node 8 --candidates 1,2,4,8 --run -- --model mpt --size 7b

Out: one JSON line with the trace and the choice; with --run the record of the job at that choice, the search
in it as `microbatch_search`. A fragmented or half-dead allocator would judge later candidates wrongly, and
messages differ between vendors: each candidate starts anew and its exit code says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

import systems

OUT_OF_MEMORY = 4


def main(arguments: list[str]) -> int:
    """Try every candidate; 0 when one ran."""
    options = _parser().parse_args(arguments)
    found = search(options)
    if found["chosen"] is None or not options.run:
        print(json.dumps(found))
        return 0 if found["chosen"] else 1
    flags = [*options.flags, "--micro-batch", str(found["chosen"])]
    record = systems.run(_here(options), flags, timeout_s=options.timeout_s)
    print(json.dumps({**record, "microbatch_search": found}))
    return 3 if record["problems"] else 0


def search(options: argparse.Namespace) -> dict[str, Any]:
    """{"chosen", "trace"}: candidates by size until one does not fit; the fastest is chosen."""
    trace: list[dict[str, Any]] = []
    for candidate in sorted(int(number) for number in options.candidates.split(",")):
        trace.append(attempt(candidate, options))
        print(json.dumps(trace[-1]), file=sys.stderr, flush=True)
        if trace[-1]["outcome"] == "out of memory":
            break
    ran = [entry for entry in trace if entry["outcome"] == "ran"]
    best = max(ran, key=lambda entry: entry["rate"], default=None)
    return {"chosen": best and best["micro_batch"], "trace": trace}


def attempt(candidate: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one candidate: its rate in units/s/GPU and its memory, or why there is none."""
    trial = ["--micro-batch", str(candidate), "--no-digest", "--no-preflight", "--no-backend-check"]
    try:
        record = systems.run(_here(options), [*options.flags, *trial], timeout_s=options.timeout_s)
    except systems.RunError as error:
        memory = error.code == OUT_OF_MEMORY
        return {"micro_batch": candidate, "outcome": "out of memory" if memory else f"failed: {error}"}
    if record["problems"] or record["performance"] is None:
        return {"micro_batch": candidate, "outcome": f"failed: {record['problems'] or 'no step was timed'}"}
    speed, memory = record["performance"], record["memory"] or {}
    return {
        "micro_batch": candidate,
        "outcome": "ran",
        "rate": speed[f"{speed['unit']}_per_s_per_gpu"],
        **{name: memory.get(name) for name in ("allocated_gib", "alloc_retries")},
    }


def _here(options: argparse.Namespace) -> systems.System:
    return systems.System("here", systems.torchrun(options.nproc_per_node))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--candidates", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("--run", action="store_true", help="then run the job with the fastest")
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
