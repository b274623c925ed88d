"""Time trainer settings, each in fresh processes: one line and one JSON record each.

    python benchmarks/train.py --out records.jsonl 4 'bf16: --size 8b …' 1 'alone: --size 8b …'
    python benchmarks/train.py --out records.jsonl --budget-s 600 --ablate native --gpus 1
    python benchmarks/train.py --out records.jsonl --budget-s 600 --ablate native --beside 0,1,2,3

A number is the number of GPUs for the settings after it. Every result is written when it comes, a failure
too. A setting that is in --out does not run again, so the same command continues one that ran out of time,
or one that SIGTERM ended together with the setting that ran.
Under a power cap a cold chip is faster: give the first setting a minute of --warmup-s. --beside runs one-GPU
settings on several GPUs at once. Chips of one model differ by 2 %, so each GPU measures the base first, and a
lever is compared with the base of its own GPU.
"""

import argparse
import json
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import ablation

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trainers"))
from tools import launch

OUT_OF_MEMORY = 4
WRITING = threading.Lock()


@dataclass(frozen=True)
class Setting:
    """Flags of train.py under a name, on a number of GPUs, or on the GPU `gpu`."""

    name: str
    gpus: int
    flags: list[str]
    gpu: str | None = None


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if options.beside and not options.ablate:
        parser.error("--beside needs --ablate: other settings may take several GPUs each")
    begin = time.monotonic()
    if options.beside:
        side_by_side(options, begin)
    else:
        in_turn(options, begin)
    if options.ablate:
        print(ablation.table(options.ablate, kept(options.out)))


def in_turn(options: argparse.Namespace, begin: float) -> None:
    """One setting after the other, each with the whole machine."""
    settings = ablation.settings(options.ablate, options.gpus) if options.ablate else options.settings
    gpus, done = 1, {result["name"] for result in kept(options.out)}
    for setting in settings:
        name, _, flags = setting.partition(":")
        left = options.budget_s - (time.monotonic() - begin)
        if setting.isdigit():
            gpus = int(setting)
        elif name in done:
            print(f"{name:34} is in {options.out}", flush=True)
        elif left < options.least_s:
            print(f"{name:34} not run: {max(left, 0):.0f} s are left", flush=True)
        else:
            chosen = Setting(name, gpus, flags.split())
            print(one(chosen, min(options.limit_s, left), options.out), flush=True)


def side_by_side(options: argparse.Namespace, begin: float) -> None:
    """On each GPU the base, then levers from one queue, until the queue is empty or the time is over."""
    done = {result["name"] for result in kept(options.out)}
    _, base, *levers = ablation.settings(options.ablate, 1)
    waiting = iter([lever for lever in levers if lever.partition(":")[0] not in done])

    def left() -> float:
        return options.budget_s - (time.monotonic() - begin)

    def work(gpu: str) -> None:
        setting: str | None = base
        while setting is not None:
            name, _, flags = setting.partition(":")
            chosen = Setting(name, 1, flags.split(), gpu)
            print(f"gpu {gpu} {one(chosen, min(options.limit_s, left()), options.out)}", flush=True)
            setting = next(waiting, None) if left() >= options.least_s else None

    with ThreadPoolExecutor(len(options.beside)) as pool:
        list(pool.map(work, options.beside))
    for lever in waiting:
        print(f"{lever.partition(':')[0]:34} not run: no time is left", flush=True)


def kept(out: Path) -> list[dict]:
    """The results in the file."""
    return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []


def one(setting: Setting, limit_s: float, out: Path) -> str:
    """Run one setting, and keep its record or the reason why there is none. Returns its line of the table."""
    begin, name, gpu = time.monotonic(), setting.name, setting.gpu
    seen = () if gpu is None else ("env", f"CUDA_VISIBLE_DEVICES={gpu}")  # HIP reads this name too
    try:
        system = launch.System(name, (*seen, *launch.torchrun(setting.gpus)))
        found = launch.run(system, [*setting.flags, "--no-digest"], timeout_s=limit_s)
        result = {**asdict(setting), **found}
        text = line(name, setting.gpus, found)
    except launch.RunError as error:
        why = "out of memory" if error.code == OUT_OF_MEMORY else str(error).splitlines()[0]
        result = {**asdict(setting), "outcome": why, "said": str(error)[-4000:]}
        text = f"{name:34} {why if error.code == OUT_OF_MEMORY else error}"
    with WRITING, out.open("a") as file:
        file.write(json.dumps(result) + "\n")
    return f"{text} {time.monotonic() - begin:4.0f} s"


def line(name: str, gpus: int, result: dict) -> str:
    """The line of the table for a record."""
    speed, memory = result["performance"], result["memory"] or {}
    if speed is None:
        return f"{name:34} x{gpus} no step was timed: {result['phases_s']}"
    unit, step = speed["unit"], speed["step_s"]
    parts = [
        f"{name:34} x{gpus} {speed[unit + '_per_s_per_gpu']:9.1f} {unit}/s/GPU",
        f"nc {speed['tflops_noncausal']:5.1f} c {speed['tflops_causal']:5.1f} TF",
        f"step {step['median'] * 1e3:7.1f} ms [{step['p5'] * 1e3:.0f}..{step['p95'] * 1e3:.0f}]",
        f"n={speed['timed_steps']}",
        f"{memory.get('allocated_gib', 0):5.1f} GiB {memory.get('alloc_retries')} retries",
        f"{speed.get('power_w', 0):4.0f} W",
        f"loss {result['losses'][0]:.3f}>{result['losses'][-1]:.3f} first {result['first_step_s']:.0f} s",
        f"attention {(result['extra'].get('attention') or {}).get('backend')}",
        *result["problems"],
    ]
    kinds = result["extra"].get("where", {}).get("kernel_ms", {})
    table = "".join(f" {kind} {ms:.0f}" for kind, ms in kinds.items())
    return "  ".join(parts) + (f"\n     kernel ms:{table}" if table else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=1e9, help="of all settings together")
    parser.add_argument("--least-s", type=float, default=60, help="start no setting with less than this left")
    parser.add_argument("--limit-s", type=float, default=240, help="longest run of one setting")
    parser.add_argument(
        "--ablate", choices=sorted(ablation.BASES), help="one flag at a time, instead of settings"
    )
    parser.add_argument("--gpus", type=int, default=1, help="with --ablate: GPUs of each setting")
    parser.add_argument(
        "--beside",
        type=lambda text: text.split(","),
        metavar="I,J",
        help="with --ablate: use these GPUs at once, a setting each",
    )
    parser.add_argument("settings", nargs="*", metavar="N | NAME: FLAGS")
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    main()
