"""Time trainer settings, each in fresh processes: one line and one JSON record each.

    python benchmarks/train.py --out records.jsonl 4 'bf16: --size 8b --precision bf16 …' 1 'alone: --size 8b
    …'

A number says on how many GPUs the settings after it run. Under a power cap a cold chip is a faster chip: give
the first
setting a minute of --warmup.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TRAIN = Path(__file__).resolve().parents[1] / "trainers" / "train.py"
OUT_OF_MEMORY = 4


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=1e9, help="start no setting after this long")
    parser.add_argument("--limit-s", type=float, default=240, help="longest run of one setting")
    parser.add_argument("settings", nargs="+", metavar="N | NAME: FLAGS")
    arguments = parser.parse_args()
    begin, gpus = time.monotonic(), 1
    for setting in arguments.settings:
        name, _, flags = setting.partition(":")
        if setting.isdigit():
            gpus = int(setting)
        elif time.monotonic() - begin > arguments.budget_s:
            print(f"{name:22} not run: the time is up", flush=True)
        else:
            print(one(name, gpus, flags.split(), arguments), flush=True)


def one(name: str, gpus: int, flags: list[str], arguments: argparse.Namespace) -> str:
    """Run one setting and keep its record; its line of the table."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record.json"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus), str(TRAIN)]
        command = [sys.executable, *command, *flags, "--no-digest", "--record", str(record)]
        begin = time.monotonic()
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=arguments.limit_s
            )
        except subprocess.TimeoutExpired:
            return f"{name:22} did not end in {arguments.limit_s:g} s"
        took = time.monotonic() - begin
        if not record.exists():
            reason = (
                "out of memory" if "OutOfMemoryError" in done.stderr else f"failed\n{done.stderr[-2500:]}"
            )
            return f"{name:22} {reason}  ({took:.0f} s)"
        result = {"name": name, "gpus": gpus, "flags": flags, **json.loads(record.read_text())}
    with arguments.out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return f"{line(name, gpus, result)} {took:4.0f} s"


def line(name: str, gpus: int, result: dict) -> str:
    """The table's line for a record."""
    speed, memory = result["performance"], result["memory"] or {}
    unit, step = speed["unit"], speed["step_s"]
    parts = [
        f"{name:22} x{gpus} {speed[unit + '_per_s_per_gpu']:9.1f} {unit}/s/GPU",
        f"nc {speed['tflops_noncausal']:5.1f} c {speed['tflops_causal']:5.1f} TF",
        f"step {step['median'] * 1e3:7.1f} ms [{step['p5'] * 1e3:.0f}..{step['p95'] * 1e3:.0f}]",
        f"n={speed['timed_steps']}",
        f"{memory.get('allocated_gib', 0):5.1f} GiB {memory.get('alloc_retries')} retries",
        f"{speed.get('power_w', 0):4.0f} W",
        f"loss {result['losses'][0]:.3f}>{result['losses'][-1]:.3f} first {result['first_step_s']:.0f} s",
    ]
    kinds = result["extra"].get("where", {}).get("kernel_ms", {})
    table = "".join(f" {kind} {ms:.0f}" for kind, ms in kinds.items())
    return "  ".join(parts) + (f"\n     kernel ms:{table}" if table else "") + "".join(result["problems"])


if __name__ == "__main__":
    main()
