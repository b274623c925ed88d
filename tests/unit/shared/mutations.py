"""Mutations of matrix.yaml and compat.yaml, and what the tool answers to a mutant.

In: the committed files. Out: texts that are nearly such a file; `stacks` or `configuration error` for each.
Anything else, be it another exit code, a traceback or an endless run, is an exception that leaves `answer`.
"""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from hypothesis import strategies as st

from stackcheck.errors import StackcheckError
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, explain, matrix, resolve
from stackcheck.matrix.compat import contradictions
from stackcheck.matrix.explain import parse_question
from stackcheck.recipe import render

ROOT = Path(__file__).parents[3]
IMAGES = ROOT / "images"
Name = Literal["matrix.yaml", "compat.yaml"]
TEXTS: dict[Name, str] = {
    "matrix.yaml": (ROOT / "matrix.yaml").read_text(encoding="utf-8"),
    "compat.yaml": (IMAGES / "compat.yaml").read_text(encoding="utf-8"),
}
RULES = compat.load_rules(IMAGES / "compat.yaml")
MATRIX = matrix.load_matrix(ROOT / "matrix.yaml")
QUESTION = ("rocm=7.2", "torch=2.6.0", "python=3.12", "arch=gfx950", "flash_attn=2.6.3", "driver=6.3")
CPU_LIMIT_S = 30.0

PIECES = (
    "&a ",
    "*a",
    "[",
    "]",
    "{",
    "}",
    ": ",
    "\n",
    "\t",
    "!!int ",
    "- ",
    "\0",
    "'",
    '"',
    "#",
    "? ",
    "<<: ",
)
VALUES = (
    *(
        "",
        "~",
        "[]",
        "{}",
        "[[]]",
        "{a: b}",
        "-1",
        "0",
        "1e999",
        "nan",
        ".inf",
        "true",
        "9" * 400,
        "1.2.3.4.5.6",
    ),
    *("'*'", "'*?*?*?*?*?*?*?*?*?*?*a'", "'[!'", "'>=1,<2'", "'>=1,'", "','", "'<'", "'==='", "'!=2'"),
    *(
        "2.13.0+cu1",
        "\u0663.1",
        "\u00b2",
        "'2.13.0\\n'",
        '"2.13.0\\nRUN id"',
        "$(id)",
        "`id`",
        "a'b",
        'a"b',
        "\\",
    ),
    *("../..", "a/b:c", "|\n  text", ">-\n  text", "&a x", "*a", "!!python/name:os.system", "!!binary aGk="),
    *("\ufeff", "\u2028", "\ud800"),
    "[" + ", ".join(f"2.{minor}.{patch}" for minor in range(15) for patch in range(10)) + "]",
    "[" + ", ".join(f"sm_{number}" for number in range(40)) + "]",
)


@st.composite
def mutants(draw: st.DrawFn, name: Name) -> str:
    """A committed file with one to four changes: to characters, to lines, or to values."""
    lines = TEXTS[name].split("\n")
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.sampled_from(("characters", "value", "value", "repeat", "drop", "move", "indent")))
        if kind == "characters":
            start, cut = draw(st.integers(0, len(lines[at]))), draw(st.integers(0, 12))
            new = draw(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)))
            lines[at] = lines[at][:start] + new + lines[at][start + cut :]
        elif kind == "value":
            key, colon, _ = lines[at].rpartition(": ")
            lines[at] = (key + colon if colon else lines[at] + " ") + draw(st.sampled_from(VALUES))
        elif kind == "repeat":
            lines.insert(draw(st.integers(0, len(lines))), lines[at])
        elif kind == "drop":
            del lines[at : at + draw(st.integers(1, 5))]
        elif kind == "move":
            lines.insert(draw(st.integers(0, len(lines) - 1)), lines.pop(at))
        else:
            lines[at] = " " * draw(st.integers(0, 9)) + lines[at].lstrip()
        lines = lines or [""]
    return "\n".join(lines)


def answer(name: Name, text: str) -> str:
    """What the tool says of a mutant: `stacks`, or `configuration error` (exit 2)."""
    try:
        with _limited():
            value = yamlfile.parse(text.encode("utf-8", "surrogatepass"), name)
            _use_matrix(value) if name == "matrix.yaml" else _use_rules(value)
    except StackcheckError as error:
        if error.exit_code != 2:
            raise
        return "configuration error"
    return "stacks"


def _use_matrix(value: dict[str, object]) -> None:
    stacks = resolve.resolve(matrix.parse(value), RULES)
    render.check(stacks[:50], IMAGES)


def _use_rules(value: dict[str, object]) -> None:
    rules = compat.parse(value)
    contradictions(rules)
    explain.explain(parse_question(QUESTION, rules), rules)
    resolve.resolve(MATRIX, rules)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """An error after too much processor time."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {CPU_LIMIT_S} s of processor time")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
