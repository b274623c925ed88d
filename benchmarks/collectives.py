"""Compare this suite's collective bandwidth with nccl-tests, in one sitting on the same GPUs.

    python benchmarks/collectives.py --nccl-tests DIR [--gpus 4] [--out comparison.json]

In: a folder with nccl-tests' binaries (all_reduce_perf …), built against the library that torch brings, and a
Python that has torch. Out: a table of busbw by operation and size (GB/s, median of the repeats), the same as
JSON, and exit code 1 where the two differ by more than the goal: 2 % from 16 MiB up, 10 % below.
docs/results/collectives-fidelity.md tells how the binaries are built and why `-t N -g 1` is the comparison.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
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


@dataclass(frozen=True)
class Line:
    """One operation at one size, GB/s."""

    op: str
    bytes: int
    suite: float
    threads: float  # nccl-tests -t N -g 1: a thread launches for each GPU, as a process of ours does
    one_thread: float  # nccl-tests -t 1 -g N: one thread launches for all of them in turn
    through_torch: float

    @property
    def difference(self) -> float:
        """How much more the suite reads than nccl-tests, as a share."""
        return self.suite / self.threads - 1

    @property
    def within(self) -> bool:
        """Whether the goal of this size is met."""
        return abs(self.difference) <= (LARGE_GOAL if self.bytes >= LARGE_BYTES else SMALL_GOAL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nccl-tests", type=Path, required=True, metavar="DIR")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    library = library_of_torch()
    before = suite(arguments.gpus)
    lines = list(compared(arguments.nccl_tests, arguments.gpus, library, before))
    after = suite(arguments.gpus)  # what drifted meanwhile is no difference between the two
    print(table(lines))
    print(f"the suite again afterwards: {drift(before, after):.2%} at most from its first reading")
    if arguments.out:
        figures = [{**asdict(line), "difference": line.difference, "within": line.within} for line in lines]
        found = {
            "gpus": arguments.gpus,
            "library": library,
            "figures": figures,
            "drift": drift(before, after),
        }
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    sys.exit(not all(line.within for line in lines))


def library_of_torch() -> str:
    """The file of the library that torch loads: nccl-tests must run on the same."""
    code = "import torch; from workloads import collective_library as c; print(c.holder())"
    return run([sys.executable, "-c", code]).strip()


def suite(gpus: int) -> dict[tuple[str, str, int], float]:
    """{(mode, op, bytes): busbw} of collective_bandwidth.py, the program behind test_collective_speed.py."""
    program = str(ACCEPTANCE / "workloads" / "collective_bandwidth.py")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    figures = json.loads(run([*torchrun, program, *BINARIES]).splitlines()[-1])["figures"]
    return {
        (figure["mode"], figure["op"], figure["bytes"]): busbw(figure, gpus)
        for figure in figures
        if figure["mode"] in {"eager", "torch"} and figure["op"] in BINARIES
    }


def busbw(figure: dict, gpus: int) -> float:
    """As nccl-tests' doc/PERFORMANCE.md defines it."""
    factor = (2 if figure["op"] == "all_reduce" else 1) * (gpus - 1) / gpus
    return figure["moved"] * factor / statistics.median(figure["seconds"]) / 1e9


def compared(
    folder: Path, gpus: int, library: str, ours: dict[tuple[str, str, int], float]
) -> Iterator[Line]:
    """Each operation and size, with both ways in which nccl-tests launches."""
    for op, binary in BINARIES.items():
        each, one = (
            theirs(folder / binary, library, "-t", str(threads), "-g", str(gpus // threads))
            for threads in (gpus, 1)
        )
        for size in sorted(size for mode, name, size in ours if (mode, name) == ("eager", op)):
            yield Line(op, size, ours["eager", op, size], each[size], one[size], ours["torch", op, size])


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


def drift(before: dict[tuple[str, str, int], float], after: dict[tuple[str, str, int], float]) -> float:
    """The largest change of the suite's own figures between its two readings."""
    return max(abs(after[key] / value - 1) for key, value in before.items() if key[0] == "eager")


def table(lines: list[Line]) -> str:
    """Markdown, as docs/results keeps it."""
    head = "| operation | bytes | suite | nccl-tests -t N | differ | goal | nccl-tests -g N | torch |"
    rows = [
        f"| {one.op} | {one.bytes} | {one.suite:.4g} | {one.threads:.4g} | {one.difference:+.1%} "
        f"| {'met' if one.within else 'missed'} | {one.one_thread:.4g} | {one.through_torch:.4g} |"
        for one in lines
    ]
    return "\n".join([head, "|---" * 8 + "|", *rows])


if __name__ == "__main__":
    main()
