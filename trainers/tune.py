"""Find the fastest microbatch, each candidate in fresh processes; out of memory is an answer, not a failure.

    python trainers/tune.py --nproc-per-node 8 --candidates 1,2,4,8 -- --model mpt --size 7b

Out: one JSON line with the trace and the choice. A fragmented or half-dead allocator would judge later
candidates wrongly, and messages differ between vendors: each candidate starts anew and its exit code says so.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TRAIN = Path(__file__).with_name("train.py")
OUT_OF_MEMORY = 4


def main(arguments: list[str]) -> int:
    """Try every candidate; 0 when one ran."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc-per-node", default="1")
    parser.add_argument("--candidates", default="1,2,3,4,6,8,12,16")
    parser.add_argument("--timeout-s", type=float, default=600)
    parser.add_argument("flags", nargs="*", help="flags of train.py, after --")
    options = parser.parse_args(arguments)
    trace = []
    for candidate in sorted(int(number) for number in options.candidates.split(",")):
        trace.append(attempt(candidate, options))
        print(json.dumps(trace[-1]), file=sys.stderr, flush=True)
        if trace[-1]["outcome"] == "out of memory":
            break
    ran = [entry for entry in trace if entry["outcome"] == "ran"]
    best = max(ran, key=lambda entry: entry["rate"], default=None)
    print(json.dumps({"chosen": best and best["micro_batch"], "trace": trace}))
    return 0 if best else 1


def attempt(candidate: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run one candidate: its rate in units/s/GPU, or why there is none."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        run = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
        run += ["--nproc-per-node", options.nproc_per_node, str(TRAIN), *options.flags]
        run += ["--micro-batch", str(candidate), "--no-digest", "--record", str(record)]
        try:
            done = subprocess.run(
                [sys.executable, *run], capture_output=True, text=True, check=False, timeout=options.timeout_s
            )
        except subprocess.TimeoutExpired:
            return {"micro_batch": candidate, "outcome": f"did not end in {options.timeout_s:g} s"}
        if not record.exists():
            # torchrun ends with 1 whatever its ranks said; it prints their codes.
            memory = f"exitcode  : {OUT_OF_MEMORY}" in done.stderr
            last = done.stderr.strip().splitlines()[-1:]
            return {"micro_batch": candidate, "outcome": "out of memory" if memory else f"failed: {last}"}
        speed = json.loads(record.read_text())["performance"]
    return {"micro_batch": candidate, "outcome": "ran", "rate": speed[f"{speed['unit']}_per_s_per_gpu"]}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
