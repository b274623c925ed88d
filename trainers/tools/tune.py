"""Find the fastest microbatch. A candidate that runs out of memory is a result, not a failure.

    python trainers/tools/tune.py --nproc-per-node 8 --candidates 1,2,4,8 --run -- --model mpt --size 7b

Out: one JSON line with the trace and the choice; with --run the record of the job at that choice, which has
the search as `microbatch_search`. Each candidate runs in fresh processes: an allocator that another one left
fragmented would change its result. Out of memory is known by the exit code, because messages differ between
vendors. Exit code 0: done. 1: no candidate ran, or the job failed. 3: the record of the job has problems.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does, and not tools/ itself
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from tools import launch

OUT_OF_MEMORY = 4


def main(arguments: list[str]) -> int:
    """Search, and with --run train; the exit code."""
    options = _parser().parse_args(arguments)
    found = search(options)
    if found["chosen"] is None or not options.run:
        print(json.dumps(found))
        return 0 if found["chosen"] is not None else 1
    flags = [*options.flags, "--micro-batch", str(found["chosen"])]
    record = launch.run(_here(options), flags, timeout_s=options.timeout_s)
    print(json.dumps({**record, "microbatch_search": found}))
    return 3 if record["problems"] else 0


def search(options: launch.Given) -> dict[str, Any]:
    """Run candidates from small to large until one runs out of memory, and choose the fastest.

    Returns {"chosen", "trace"}.
    """
    trace: list[dict[str, Any]] = []
    for candidate in sorted(int(number) for number in options.candidates.split(",")):
        trace.append(attempt(candidate, options))
        print(json.dumps(trace[-1]), file=sys.stderr, flush=True)
        if trace[-1]["outcome"] == "out of memory":
            break
    ran = [entry for entry in trace if entry["outcome"] == "ran"]
    best = max(ran, key=lambda entry: entry["rate"], default=None)
    return {"chosen": best and best["micro_batch"], "trace": trace}


def attempt(candidate: int, options: launch.Given) -> dict[str, Any]:
    """Run one candidate: its rate in units/s/GPU and its memory, or the reason why it has none."""
    trial = ["--micro-batch", str(candidate), "--no-digest", "--no-preflight", "--no-backend-check"]
    try:
        record = launch.run(_here(options), [*options.flags, *trial], timeout_s=options.timeout_s)
    except launch.RunError as error:
        reason = "out of memory" if error.code == OUT_OF_MEMORY else f"failed: {error}"
        return {"micro_batch": candidate, "outcome": reason}
    if record["problems"] or record["performance"] is None:
        return {"micro_batch": candidate, "outcome": f"failed: {record['problems'] or 'no step was timed'}"}
    speed, memory = record["performance"], record["memory"] or {}
    return {
        "micro_batch": candidate,
        "outcome": "ran",
        "rate": speed[f"{speed['unit']}_per_s_per_gpu"],
        **{name: memory.get(name) for name in ("allocated_gib", "alloc_retries")},
    }


def _here(options: launch.Given) -> launch.System:
    return launch.System("here", launch.torchrun(options.nproc_per_node))


def _parser() -> launch.Parser:
    parser = launch.parser(__doc__)
    parser.add_argument("--nproc-per-node", default="1", help="ranks on this host")
    parser.add_argument("--candidates", default="1,2,3,4,6,8,12,16", help="samples per GPU and microbatch")
    parser.add_argument("--timeout-s", type=float, default=600, help="longest run of one candidate")
    parser.add_argument("--run", action="store_true", help="then run the job with the fastest candidate")
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
