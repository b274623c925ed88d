"""Compare this suite's collective bandwidth with nccl-tests, in one run on the same GPUs.

    python benchmarks/collectives.py --nccl-tests DIR [--gpus 4] [--rounds 3] [--out comparison.json]
    python benchmarks/collectives.py --nccl-tests DIR --rounds 5 all_to_all

In: a folder with nccl-tests' binaries (all_reduce_perf …), built against the library that torch brings, and a
Python that has torch. Out: a table of busbw by operation and size (GB/s, median of the launches, which take
turns), the same as JSON with every launch, and exit code 1 where the two differ by more than the goal: 2 %
from 16 MiB up, 10 % below.
docs/results/collectives-fidelity.md tells how the binaries are built and why `-t N -g 1` is the comparison.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ACCEPTANCE = Path(__file__).resolve().parents[1] / "tests" / "acceptance"
BINARIES = {
    "all_reduce": "all_reduce_perf",
    "all_gather": "all_gather_perf",
    "reduce_scatter": "reduce_scatter_perf",
    "all_to_all": "alltoall_perf",
}
# The suite's own sizes are every second or so of 64 KiB x 4^i; the others warm up and are not compared.
SWEEP = ("-b", "64K", "-e", "1G", "-f", "4", "-d", "bfloat16", "-n", "20", "-w", "5", "-N", "5", "-c", "1")
LARGE_BYTES, LARGE_GOAL, SMALL_GOAL = 16 << 20, 0.02, 0.10
TIMEOUT_S = 200
# size, count, type, redop, root, then out of place: time (us), algbw, busbw (GB/s)
ROW = re.compile(r"^\s*(\d+)\s+\d+\s+\w+\s+\w+\s+-?\d+\s+[\d.]+\s+[\d.]+\s+([\d.]+)\s")


Reading = dict[tuple[str, str, int], float]  # (who, operation, bytes) -> GB/s
MODES = {"eager": "suite", "torch": "through_torch"}
READERS = ("suite", "threads", "one_thread", "through_torch")


@dataclass(frozen=True)
class Line:
    """One operation at one size; GB/s, a figure for each launch."""

    op: str
    bytes: int
    suite: tuple[float, ...]
    threads: tuple[float, ...]  # nccl-tests -t N -g 1: a thread for each GPU, as ours has a process
    one_thread: tuple[float, ...]  # nccl-tests -t 1 -g N: one thread launches for all of them in turn
    through_torch: tuple[float, ...]

    @property
    def difference(self) -> float:
        """How much more the suite reads than nccl-tests, as a share; medians of the launches."""
        return statistics.median(self.suite) / statistics.median(self.threads) - 1

    @property
    def within(self) -> bool:
        """Whether the goal of this size is met."""
        return abs(self.difference) <= (LARGE_GOAL if self.bytes >= LARGE_BYTES else SMALL_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("operations", nargs="*", metavar="OPERATION", help=f"of {', '.join(BINARIES)}: all")
    parser.add_argument("--nccl-tests", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3, help="launches of each, in turns")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    operations = arguments.operations or list(BINARIES)
    if unknown := sorted(set(operations) - set(BINARIES)):
        parser.error(f"no operation {', '.join(unknown)}; there are {', '.join(BINARIES)}")
    library = library_of_torch()
    # In turns: what drifts meanwhile, or changes from launch to launch, is no difference between the two.
    rounds = [
        one_round(arguments.nccl_tests, arguments.gpus, library, operations) for _ in range(arguments.rounds)
    ]
    lines = compared(rounds)
    print(table(lines))
    if arguments.out:
        figures = [{**asdict(line), "difference": line.difference, "within": line.within} for line in lines]
        found = {"gpus": arguments.gpus, "library": library, "rounds": len(rounds), "figures": figures}
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(line.within for line in lines))


def library_of_torch() -> str:
    """The file of the library that torch loads: nccl-tests must run on the same."""
    code = "import torch; from workloads import collective_library as c; print(c.holder())"
    return run([sys.executable, "-c", code]).strip()


def suite(gpus: int, operations: Sequence[str]) -> Reading:
    """{(who, op, bytes): busbw} of collective_bandwidth.py, the program behind test_collective_speed.py."""
    program = str(ACCEPTANCE / "workloads" / "collective_bandwidth.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    figures = json.loads(run([*torchrun, program, *operations]).splitlines()[-1])["figures"]
    return {
        (MODES[figure["mode"]], figure["op"], figure["bytes"]): busbw(figure, gpus)
        for figure in figures
        if figure["mode"] in MODES and figure["op"] in operations
    }


def busbw(figure: dict, gpus: int) -> float:
    """As nccl-tests' doc/PERFORMANCE.md defines it."""
    factor = (2 if figure["op"] == "all_reduce" else 1) * (gpus - 1) / gpus
    return figure["moved"] * factor / statistics.median(figure["seconds"]) / 1e9


def one_round(folder: Path, gpus: int, library: str, operations: Sequence[str]) -> Reading:
    """One launch of the suite, and one of nccl-tests for each operation in both ways that it launches."""
    reading = suite(gpus, operations)
    for op in operations:
        for who, threads in (("threads", gpus), ("one_thread", 1)):
            launching = ("-t", str(threads), "-g", str(gpus // threads))
            rows = theirs(folder / BINARIES[op], library, *launching)
            reading |= {(who, op, size): busbw for size, busbw in rows.items()}
    return reading


def compared(rounds: Sequence[Reading]) -> list[Line]:
    """A line for each operation and size that the suite measures."""
    measured = [(op, size) for who, op, size in rounds[0] if who == "suite"]
    return [
        Line(op, size, **{who: tuple(reading[who, op, size] for reading in rounds) for who in READERS})
        for op, size in measured
    ]


def theirs(binary: Path, library: str, *launching: str) -> dict[int, float]:
    """{bytes: busbw out of place}, the median of the cycles."""
    return parsed(run([str(binary), *SWEEP, *launching], LD_LIBRARY_PATH=str(Path(library).parent)))


def parsed(text: str) -> dict[int, float]:
    """{bytes: median busbw} of nccl-tests' table; each cycle (-N) repeats the rows."""
    rows: dict[int, list[float]] = {}
    for line in text.splitlines():
        if found := ROW.match(line):
            rows.setdefault(int(found[1]), []).append(float(found[2]))
    if not rows:
        raise SystemExit(f"no row of nccl-tests' table in:\n{text[-2000:]}")
    return {size: statistics.median(figures) for size, figures in rows.items()}


def run(command: list[str], **variables: str) -> str:
    """Its output. Ends this program when the command fails."""
    path = os.pathsep.join(filter(None, (str(ACCEPTANCE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} exited with {done.returncode}\n{(done.stderr or done.stdout)[-3000:]}"
        )
    return done.stdout


def table(lines: list[Line]) -> str:
    """Markdown, as docs/results keeps it."""
    head = "| operation | bytes | suite | nccl-tests -t N | differ | goal | nccl-tests -g N | torch |"
    rows = [
        f"| {one.op} | {one.bytes} | {shown(one.suite)} | {shown(one.threads)} | {one.difference:+.1%} "
        f"| {'met' if one.within else 'missed'} | {shown(one.one_thread)} | {shown(one.through_torch)} |"
        for one in lines
    ]
    return "\n".join([head, "|---" * 8 + "|", *rows])


def shown(launches: Sequence[float]) -> str:
    """The median, and the range where launches differ by more than the goal of large sizes."""
    least, most = min(launches), max(launches)
    text = f"{statistics.median(launches):.4g}"
    return text if most <= (1 + LARGE_GOAL) * least else f"{text} ({least:.4g} to {most:.4g})"


if __name__ == "__main__":
    main()
