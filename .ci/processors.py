"""Run every numeric test as other processors would compute it. In: `[--all] [--setting NAME…]
[--python PYTHON] [--with WORDS] [TEST…]`. Out: 0 only where every test passed, and a table.

A setting limits ATen, oneDNN, MKL and torch's compiler together: ATen's limit also tells the compiler which
vectors to use, and oneDNN's is never above it, because compiled attention packs as oneDNN would
(https://github.com/pytorch/pytorch, at::native::cpublas::could_pack) with the vectors that the compiler has.
A setting that this processor cannot run is named, and never counts as passed.

Without `--all` each kind of processor with other vectors than this one's runs once, two kinds at a time, with
one thread or with two, without tests marked slow: `make test` runs the same tests on this processor as it is.
So AVX-512 without AMX does not run on a processor with AMX. PYTHON needs torch and pytest; what else is
missing (transformers, diffusers, torchao, lm_eval, a compiler) skips the tests that need it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "logs" / "numbers-on-processors"  # .ci/stage.py looks for it there
AVX2 = frozenset({"avx2", "fma"})
AVX512 = AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
WITHOUT_AMX = ROOT / ".ci" / "without_amx"  # on PYTHONPATH: what a limit of oneDNN alone does not change
LIMITS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
# A run of all settings on a machine of two cores takes minutes, of the slow tests half an hour.
PART_LIMIT_S = 5400


@dataclass(frozen=True)
class Setting:
    """What a kind of processor computes with, and what a processor needs to play it."""

    name: str
    aten: str
    onednn: str
    mkl: dict[str, str]
    needs: frozenset[str]

    def environment(self, threads: int) -> dict[str, str]:
        """The variables that libraries read while they are loaded."""
        count = dict.fromkeys(THREADS, f"{threads}")
        return {"ATEN_CPU_CAPABILITY": self.aten, "ONEDNN_MAX_CPU_ISA": self.onednn, **self.mkl, **count}


# MKL_ENABLE_INSTRUCTIONS limits MKL on Intel's processors; MKL_CBWR=COMPATIBLE means its plainest code.
SETTINGS = (
    Setting("default", "default", "SSE41", {"MKL_CBWR": "COMPATIBLE"}, frozenset()),
    Setting("avx2", "avx2", "AVX2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, AVX2),
    Setting("avx2-onednn-avx", "avx2", "AVX", {"MKL_ENABLE_INSTRUCTIONS": "AVX"}, AVX2),
    Setting("avx512", "avx512", "AVX512_CORE", {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}, AVX512),
    Setting("avx512-onednn-avx2", "avx512", "AVX2", {"MKL_ENABLE_INSTRUCTIONS": "AVX2"}, AVX512),
    Setting("amx", "avx512", "AVX512_CORE_AMX", {"MKL_ENABLE_INSTRUCTIONS": "AVX512"}, AMX),
)
USUAL = {"default": 1, "avx2": 2, "avx512": 1, "amx": 2}  # threads of each in a run without --all
AT_ONCE = 2  # of those that are not asked for by name
MOST_THREADS = 2
ALL = [f"{setting.name}-{threads}" for setting in SETTINGS for threads in range(1, MOST_THREADS + 1)]
FAULTS = tuple(
    f"tests/faults/test_{name}_faults.py"
    for name in (
        "numeric",
        "margin",
        "training",
        "training_variants",
        "collective",
        "generated_collective",
        "witness",
        "processor",
    )
)
SUITES = tuple(
    f"tests/acceptance/test_{name}.py"
    for name in (
        "kernels",
        "attention",
        "compiled",
        "collectives",
        "training",
        "training_variants",
        "packages",
        "devices_memory",
        "witness",
    )
)
SUITE_FLAGS = ("--gpu-vendor", "cpu", "--tier", "smoke")
# These compare two clocks, and another setting runs beside them.
NO_CLOCK = ("-k", "not witness_of_speed and not honest_child")
PROBE = """
import torch
print("torch:", torch.__version__, "CPU capability", torch.backends.cpu.get_cpu_capability(), flush=True)
torch.zeros(8, 8).to_mkldnn().to_dense()
"""


def trainers() -> tuple[str, ...]:
    """The files of tests/trainers that compare numbers: all do it by tests/trainers/agree.py."""
    files = sorted((ROOT / "tests/trainers").glob("test_*.py"))
    return tuple(f"{path.relative_to(ROOT)}" for path in files if "from agree import" in path.read_text())


def flags_of_processor() -> tuple[str, frozenset[str]]:
    """Its name, and what it can do."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    return facts.get("model name", "unknown"), frozenset(facts.get("flags", "").split())


def environment(setting: Setting, threads: int) -> dict[str, str]:
    """The environment of a run: the limits of this setting and no others."""
    kept = {name: value for name, value in os.environ.items() if name not in {*LIMITS, *THREADS}}
    if "amx_int8" in flags_of_processor()[1] and not setting.needs >= AMX:
        kept["PYTHONPATH"] = os.pathsep.join(filter(None, (f"{WITHOUT_AMX}", kept.get("PYTHONPATH"))))
    return kept | setting.environment(threads)


def probe(python: str, setting: Setting, threads: int) -> str | None:
    """Why the limits do not reach the libraries; None where they do. What they said is printed."""
    variables = environment(setting, threads) | {"ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [python, "-c", PROBE], env=variables, capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        return f"{python} cannot load torch: {done.stderr.strip().splitlines()[-1:]}"
    said = [line for line in done.stdout.splitlines() if "torch:" in line or ",isa:" in line]
    print(f"{setting.name}-{threads}: {'; '.join(line.split('info,')[-1] for line in said)}", flush=True)
    wanted = f"CPU capability {setting.aten.upper()}"
    return None if any(wanted in line for line in said) else f"expected {wanted}, got {said}"


@dataclass(frozen=True)
class Run:
    """Tests that one pytest runs, and how it ended."""

    part: str
    words: tuple[str, ...]

    def under(self, setting: Setting, threads: int, python: str) -> tuple[Counter[str], list[str], float]:
        """Counts by outcome, the ids of what failed, and seconds."""
        LOGS.mkdir(parents=True, exist_ok=True)
        log = LOGS / f"{setting.name}-{threads}-{self.part}.log"
        report, results, margins = (log.with_suffix(end) for end in (".xml", "", ".jsonl"))
        report.unlink(missing_ok=True)
        margins.unlink(missing_ok=True)
        command = [
            python,
            "-m",
            "pytest",
            *self.words,
            "-q",
            "-p",
            "no:cacheprovider",
            f"--junitxml={report}",
        ]
        if "--gpu-vendor" in self.words:
            command += ["--result-dir", f"{results}"]
        begin = time.monotonic()
        with log.open("wb") as file:
            try:
                done = subprocess.run(
                    command,
                    cwd=ROOT,
                    env=environment(setting, threads) | {"STACKCHECK_MARGINS": f"{margins}"},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    check=False,
                    timeout=PART_LIMIT_S,
                )
                code = done.returncode
            except subprocess.TimeoutExpired:
                code = -1
        counts, failed = outcomes(report, self.words) if report.exists() else (Counter[str](), [])
        if code not in {0, 5} and not failed:  # 5: nothing was selected
            counts["failed"] += 1
            failed.append(f"{self.part} as a whole: pytest ended with {code}, see {log.relative_to(ROOT)}")
        return counts, failed, time.monotonic() - begin


def outcomes(report: Path, words: tuple[str, ...]) -> tuple[Counter[str], list[str]]:
    """What pytest's own report says."""
    places = {Path(word.split("::")[0]).name: word.split("::")[0] for word in words}
    counts, failed = Counter[str](), []
    for case in ET.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        outcome = next((word for word in ("failure", "error", "skipped") if word in kinds), "passed")
        counts[{"failure": "failed", "error": "failed"}.get(outcome, outcome)] += 1
        if outcome in {"failure", "error"}:
            file = Path(case.get("file") or f"{(case.get('classname') or '').split('.')[-1]}.py").name
            failed.append(f"{places.get(file, file)}::{case.get('name')}")
    return counts, failed


def used(margins: Path) -> str:
    """The largest part of its bound that a comparison needed (tests/trainers/agree.py), and which one."""
    if not margins.exists():
        return ""
    worst = max(
        map(json.loads, margins.read_text(encoding="utf-8").splitlines()), key=lambda one: one["share"]
    )
    return f" at most {worst['share']:.2f} of a bound: {worst['test']} ({worst['what']})"


def parts(tests: list[str], *, slow: bool) -> list[Run]:
    """What to run: the named tests, or all that compute."""
    marks = () if slow else ("-m", "not slow")
    if tests:  # each folder of tests/ has a conftest of its own, and one pytest takes one of that name
        folders = sorted({Path(test.split("::")[0]).parent for test in tests})
        return [
            Run(
                folder.name or "tests",
                (*(test for test in tests if folder == Path(test.split("::")[0]).parent), *flags),
            )
            for folder in folders
            for flags in [SUITE_FLAGS if folder.name == "acceptance" else ()]
        ]
    return [
        Run("trainers", (*trainers(), *marks)),
        Run("suites", (*SUITES, *SUITE_FLAGS, *NO_CLOCK)),
        # A hang is the same on every processor.
        Run("faults", (*FAULTS, *NO_CLOCK, *(() if slow else ("-m", "not slow and not waits")))),
    ]


def arguments() -> argparse.Namespace:
    """What to run, and how."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--all", action="store_true", help="every setting, with one and two threads, slow tests too"
    )
    parser.add_argument("--setting", action="append", choices=ALL, help="this setting alone; may be repeated")
    parser.add_argument("--python", default=sys.executable, help="a Python that has torch and pytest")
    parser.add_argument(
        "--with", dest="prefix", default="python", help="how a printed command starts this file"
    )
    parser.add_argument(
        "tests", nargs="*", metavar="TEST", help="a file or an id, such as tests/trainers/test_lean.py"
    )
    return parser.parse_args()


def other_kinds(flags: frozenset[str]) -> list[str]:
    """The names in USUAL with other vectors than a processor with these flags has, or that it lacks."""
    kinds = [one for one in SETTINGS if one.name in USUAL]
    vectors = [one.aten for one in kinds if one.needs <= flags][-1]
    return [
        one.name for one in kinds if one.name == "default" or one.aten != vectors or not one.needs <= flags
    ]


@dataclass(frozen=True)
class Ended:
    """How the tests ended under one setting; `lines` are of the table, `ran` says that it can run here."""

    lines: list[str]
    problems: list[str]
    counts: Counter[str]
    ran: bool


def under(chosen: str, flags: frozenset[str], asked: argparse.Namespace) -> Ended:
    """Run what is asked for under one setting."""
    kind, _, threads = chosen.rpartition("-")
    setting = next(one for one in SETTINGS if one.name == kind)
    if lacking := sorted(setting.needs - flags):
        return Ended(
            [f"not on this processor: {chosen} (it lacks {', '.join(lacking)})"], [], Counter(), ran=False
        )
    if why := probe(asked.python, setting, int(threads)):
        return Ended([], [f"FAILED {chosen}: the setting has no effect: {why}"], Counter(), ran=False)
    lines, problems, total = list[str](), list[str](), Counter[str]()
    for run in parts(asked.tests, slow=asked.all):
        counts, failed, seconds = run.under(setting, int(threads), asked.python)
        total += counts
        row = " | ".join(f"{counts[word]:>4}" for word in ("passed", "failed", "skipped"))
        worst = used(LOGS / f"{chosen}-{run.part}.jsonl")
        lines.append(f"| {chosen:<20} | {run.part:<8} | {row} | {seconds:>5.0f} s |{worst}")
        again = f"{asked.prefix} .ci/processors.py --setting {chosen}"
        problems += [f"FAILED {test}\n  repeat: {again} {shlex.quote(test)}" for test in failed]
    return Ended(lines, problems, total, ran=True)


def main() -> int:
    """Run and print."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # else its threads wait for their tests
    asked, begin = arguments(), time.monotonic()
    name, flags = flags_of_processor()
    known = sorted(
        flags & (AMX | {"sse4_2", "f16c", "avx", "avx512_vnni", "avx_vnni", "amx_int8", "avx512_fp16"})
    )
    print(f"processor: {name}; {os.cpu_count()} cores; {' '.join(known)}", flush=True)
    others = [f"{kind}-{USUAL[kind]}" for kind in other_kinds(flags)]
    total, problems, ran = Counter[str](), list[str](), 0
    with ThreadPoolExecutor(1 if asked.setting else AT_ONCE) as pool:
        for ended in pool.map(
            lambda chosen: under(chosen, flags, asked), asked.setting or (ALL if asked.all else others)
        ):
            for line in ended.lines:
                print(line, flush=True)
            problems += ended.problems
            total += ended.counts
            ran += ended.ran
    print("\n".join(problems))
    if not ran:
        print("FAILED: no setting ran")
    words = ", ".join(f"{total[word]} {word}" for word in ("passed", "failed", "skipped"))
    print(f"{ran} settings: {words} in {time.monotonic() - begin:.1f}s")
    return int(bool(problems) or not ran or not total["passed"])


if __name__ == "__main__":
    sys.exit(main())
