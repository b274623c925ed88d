"""Plant slow-downs of 2 and 5 % on a GPU and record what fresh processes measure, healthy ones beside them.

Usage, with the image's Python: python benchmarks/slowdown.py OUT.json [ROUNDS]. Each round starts one
process for each arm, in turn: healthy, healthy again, 2 % slow, 5 % slow. A process measures with the suites'
own code (tests/acceptance/workloads/kernel_speed.py); a planted one spins on the device after each call, for
that share of the call's own time.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

ARMS = {"healthy": 0.0, "healthy again": 0.0, "2 % slow": 0.02, "5 % slow": 0.05}
SPIN = 10**7


def measure(share: float) -> dict[str, list[float]]:
    import torch

    from workloads import kernel_speed, timing

    def seconds(function, calls=20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / calls / 1e3

    healthy = timing.repeats

    def planted(function, **options):
        own = healthy(function, count=1)[0]
        cycles = int(share * own * SPIN / seconds(lambda: torch.cuda._sleep(SPIN), 3))
        return healthy(lambda: (function(), torch.cuda._sleep(cycles)), **options)

    if share:
        timing.repeats = planted
    figures = {
        "gemm_tflops": kernel_speed._gemm("bf16", 8192, 8192, 8192, timed=timing.repeats),
        "attention_forward_tflops": kernel_speed.attention_forward("default")[0],
        "copy_gb_per_s": kernel_speed._copy(timing.repeats),
    }
    return {name: figure["repeats"] for name, figure in figures.items()}


def main(out: str, rounds: int = 10) -> None:
    runs = []
    for turn in range(rounds):
        for arm, share in ARMS.items():
            began = time.time()
            ran = subprocess.run(
                [sys.executable, __file__, "--child", str(share)], capture_output=True, text=True, check=False
            )
            if ran.returncode:
                sys.exit(ran.stderr)
            values = json.loads(ran.stdout.splitlines()[-1])
            runs.append({"round": turn, "arm": arm, "seconds": round(time.time() - began, 1), **values})
            Path(out).write_text(json.dumps(runs))
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,uuid", "--format=csv,noheader"]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    print(listed.strip(), len(runs), "processes")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "acceptance"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", nargs="?", help="where the runs go")
    parser.add_argument("rounds", nargs="?", type=int, default=10, help="how often each arm runs")
    parser.add_argument("--child", type=float, metavar="SHARE", help="measure in this process, and print")
    given = parser.parse_args()
    if given.child is not None:
        print(json.dumps(measure(given.child)))
    elif given.out is None:
        parser.error("name the file for the runs")
    else:
        main(given.out, given.rounds)
