"""Time the matrix: expand, judge and render 10,000 combinations; explain; render the committed matrix again.

Usage: python benchmarks/matrix.py [--fuzz N [--seed S]]. Prints one JSON document. With --fuzz it mutates
matrix.yaml and compat.yaml N times, and stops at anything that is not a result or a configuration error.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck.errors import CombinationError
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, expand, explain, matrix, resolve
from stackcheck.matrix.combination import broken_by_cell, combination, packages_of
from stackcheck.matrix.explain import parse_question
from stackcheck.recipe import render

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "images"
FUZZ_BATCH = 1000
QUESTION = "rocm=7.2 torch=2.6.0 python=3.12 arch=gfx950 flash_attn=2.6.3 driver=6.3"


def seconds(function: Callable[[], object], repeats: int) -> dict[str, float]:
    """Seconds by the clock on the wall: the first call, and the median and the range of those after it."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    first, *rest = (round(took, 4) for took in times)
    return {
        "first": first,
        "median": statistics.median(rest),
        "least": min(rest),
        "most": max(rest),
        "n": repeats,
    }


def process(*arguments: str) -> None:
    command = [sys.executable, "-m", "stackcheck", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    assert done.returncode in {0, CombinationError.exit_code}, command  # a refused combination is an answer


def ten_thousand() -> int:
    """10,000 cells of one block, most of them refused: all are judged and rendered."""
    value = yamlfile.load(ROOT / "matrix.yaml")
    block = next(one for one in value["stacks"] if one["runtime"] == "rocm")
    rules = compat.load(IMAGES / "compat.yaml")
    versions = [f"7.{minor}.{patch}" for minor in range(1, 3) for patch in range(5)]
    torches = [f"2.{minor}.{patch}" for minor in range(1, 15) for patch in range(4)][:50]
    value["stacks"] = [
        {**block, "version": versions, "torch": torches, "python": ["3.10", "3.11", "3.12", "3.13", "3.14"],
         "os": ["ubuntu22.04", "ubuntu24.04"], "wheels": ["upstream", "amd"], "tested_on": []}
    ]  # fmt: skip
    value.pop("include")
    found = matrix.parse(value)
    expanded, settings_of = expand.expand(found), expand.settings(found)
    for cell in expanded:
        settings = settings_of(cell)
        values = combination(cell, "amd", packages_of(cell, settings, found), rules)
        stack = resolve.stack_of(cell, settings, found, values)
        broken_by_cell(values, stack.archs, stack.tested_on or (), rules)
        render.render(stack, IMAGES)
    return len(expanded)


def fuzz(count: int, seed: int) -> dict[str, object]:
    """Answer mutants of both files, three of matrix.yaml for one of compat.yaml; the first defect ends it."""
    sys.path.insert(0, str(ROOT / "tests" / "unit"))

    answers: Counter[str] = Counter()
    slowest, started = 0.0, time.process_time()
    for batch in range(0, count, FUZZ_BATCH):
        name = "compat.yaml" if batch // FUZZ_BATCH % 4 == 3 else "matrix.yaml"
        for answer, took in answer_some(name, number=min(FUZZ_BATCH, count - batch), seeded=seed + batch):
            answers[f"{name}: {answer}"] += 1
            slowest = max(slowest, took)
        print(f"{sum(answers.values())} mutants: {dict(answers)}", file=sys.stderr, flush=True)
    return {
        "mutants": sum(answers.values()),
        "answers": dict(sorted(answers.items())),
        "slowest answer, s of processor time": round(slowest, 3),
        "processor time, s": round(time.process_time() - started, 1),
    }


def answer_some(name: str, *, number: int, seeded: int) -> list[tuple[str, float]]:
    """The answers to some mutants, each with the seconds of processor time that it took."""
    from hypothesis import HealthCheck, Phase, given, seed, settings

    import mutations

    answers = []

    @seed(seeded)
    @settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(mutations.mutants(name))
    def answered(text: str) -> None:
        start = time.process_time()
        answers.append((mutations.answer(name, text), time.process_time() - start))

    answered()
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--fuzz", type=int, default=0, metavar="N", help="mutants to answer, and nothing else"
    )
    parser.add_argument("--dry-run", action="store_true", help="call each thing once, and print no figure")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="another seed, other mutants")
    arguments = parser.parse_args()
    if arguments.dry_run:
        print(f"{len(figures(calls=1))} figures can be made")
        return
    print(json.dumps(fuzz(arguments.fuzz, arguments.seed) if arguments.fuzz else figures(), indent=2))


def figures(calls: int | None = None) -> dict[str, object]:
    """All of them, by what they are of. `calls`: of each thing, in place of its own number."""

    def timed(function: Callable[[], object], repeats: int) -> dict[str, float]:
        return seconds(function, calls or repeats)

    rules, found = compat.load(IMAGES / "compat.yaml"), matrix.load(ROOT / "matrix.yaml")
    question = QUESTION.split()
    stack = resolve.load_stacks(ROOT)[-1].id
    return {
        "python": platform.python_version(),
        "processors": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rules": len(rules),
        "combinations": ten_thousand(),
        "expand, judge and render all combinations, s": timed(ten_thousand, 9),
        "explain, refused, s": timed(
            lambda: explain.explain(parse_question(question, rules), rules, found), 50
        ),
        "explain, a stack, s": timed(lambda: explain.explain_stack(stack, found, rules), 50),
        "explain, rules read again, s": timed(
            lambda: explain.explain(parse_question(question, rules), compat.load(IMAGES / "compat.yaml")), 20
        ),
        "load and render the committed matrix, s": timed(
            lambda: render.check(resolve.load_stacks(ROOT), IMAGES), 20
        ),
        "stackcheck explain as a process, s": timed(lambda: process("explain", *question), 9),
        "stackcheck render --check as a process, s": timed(lambda: process("render", "--check"), 9),
        "python -c pass as a process, s": timed(
            lambda: subprocess.run([sys.executable, "-c", "pass"], check=True), 9
        ),
    }


if __name__ == "__main__":
    main()
