"""Time the matrix: expand, judge and render 10,000 combinations; explain; render the committed matrix again.

Usage: python benchmarks/matrix.py [--fuzz N]. Prints one JSON document. With --fuzz it mutates matrix.yaml
and compat.yaml N times and stops at anything that is not a result or a configuration error.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from stackcheck import cells, compat, explain, matrix, render, resolve, yamlfile
from stackcheck.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "images"
QUESTION = "rocm=7.2 torch=2.6.0 python=3.12 arch=gfx950 flash_attn=2.6.3 driver=6.3"


def seconds(function: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def ten_thousand() -> int:
    """10,000 cells of one block, most of them refused: all are judged and rendered."""
    value = yamlfile.read(ROOT / "matrix.yaml")
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
    expanded = cells.expand(found)
    for cell in expanded:
        settings = cells.settings_of(cell, found)
        values = resolve.combination(cell, "amd", rules)
        stack = resolve.stack_of(cell, settings, found, values)
        resolve.judge_cell(values, stack.archs, stack.tested_on, rules)
        render.render(stack, IMAGES)
    return len(expanded)


def fuzz(count: int, seed: int = 1) -> dict[str, int]:
    source = random.Random(seed)
    texts = {"matrix": (ROOT / "matrix.yaml").read_bytes(), "compat": (IMAGES / "compat.yaml").read_bytes()}
    rules, answers = compat.load(IMAGES / "compat.yaml"), {"stacks": 0, "configuration error": 0}
    pieces = [
        b"&a ",
        b"*a",
        b"[",
        b"]",
        b"{",
        b"}",
        b": ",
        b"\n",
        b"\t",
        b"!!int ",
        b"- ",
        b"\x00",
        b"'",
        b'"',
        b"#",
        b"9" * 400,
    ]
    for _ in range(count):
        name = source.choice(["matrix", "matrix", "matrix", "compat"])
        text = texts[name]
        for _ in range(source.randint(1, 4)):
            start = source.randint(0, len(text))
            text = (
                text[:start]
                + source.choice([*pieces, source.randbytes(3)])
                + text[start + source.randint(0, 12) :]
            )
        try:
            value = yamlfile.parse(text, name)
            if name == "matrix":
                resolve.resolve(matrix.parse(value), rules)
            else:
                compat.parse(value)
            answers["stacks"] += 1
        except ConfigurationError:
            answers["configuration error"] += 1
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fuzz", type=int, default=0, metavar="N")
    arguments = parser.parse_args()
    rules = compat.load(IMAGES / "compat.yaml")
    start = time.perf_counter()
    count = ten_thousand()
    figures: dict[str, object] = {
        "combinations": count,
        "expanded, judged and rendered, s": round(time.perf_counter() - start, 3),
        "explain, s": round(
            seconds(lambda: explain.explain(explain.parse_question(QUESTION.split(), rules), rules)), 4
        ),
        "load and render the committed matrix, s": round(
            seconds(lambda: render.check(resolve.load_stacks(ROOT), IMAGES)), 4
        ),
        "stackcheck list as a process, s": round(
            seconds(
                lambda: subprocess.run(
                    [sys.executable, "-m", "stackcheck", "list"],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
            ),
            3,
        ),
    }
    if arguments.fuzz:
        figures["fuzz"] = fuzz(arguments.fuzz)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
