"""No test waits without a limit for a program's line or end, or for a state that may never come.

`waits` (tests/unit/shared) waits with a limit, and its error says what the program wrote so far. Programs
that `subprocess.run` starts are not looked at, nor the threads of a test's own servers.
"""

import ast
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import scripted
import waits

TESTS = Path(__file__).resolve().parents[2]
PIPES, READS = {"stdout", "stderr"}, {"read", "readline", "readlines"}
CLOCKS = {"monotonic", "perf_counter", "time"}
# What others end: the helper itself, programs that their parent kills, a watch that its client ends.
ENDED_BY_OTHERS = {
    "unit/shared/waits.py",
    "faults/fakeamd/moving.py",
    "faults/warm_python.py",
    "unit/shared/small_kubernetes.py",
}
WORK = "work"  # of torch.distributed: its process group has the limit
SIGNS = ("communicate", "wait(", "stdout", "stderr", "sleep(")  # a file without one has no such wait


def name_of(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_pipe(node: ast.AST) -> bool:
    """Whether it is a program's pipe: `process.stdout`, also `process.stdout or ()`; not `sys.stdout`."""
    if isinstance(node, ast.BoolOp):
        return any(map(is_pipe, node.values))
    return isinstance(node, ast.Attribute) and node.attr in PIPES and name_of(node.value) != "sys"


def called(node: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """The methods and functions that are called below a node, by their last name."""
    for each in ast.walk(node):
        if isinstance(each, ast.Call):
            yield getattr(each.func, "attr", getattr(each.func, "id", "")), each


def unlimited(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and kind of each wait without a limit."""
    for name, call in called(tree):
        keywords = {one.arg for one in call.keywords if not is_none(one.value)}
        if name == "communicate" and "timeout" not in keywords:
            yield call.lineno, "communicate without a timeout"
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call
        if name == "wait" and owner is not call and not (call.args or keywords or name_of(owner) == WORK):
            yield call.lineno, "wait without a timeout"
        reader = call.args[0] if name == "iter" and call.args else call.func
        if isinstance(reader, ast.Attribute) and reader.attr in READS and is_pipe(reader.value):
            yield call.lineno, f"{reader.attr} of a program's pipe"
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and is_pipe(node.iter):
            yield node.iter.lineno, "every line of a program's pipe"
        if isinstance(node, ast.While):
            names = {name for name, _ in called(node)}
            if "sleep" in names and not names & CLOCKS:
                yield node.lineno, "a loop that sleeps, and looks at no clock"


def found(folder: Path) -> Iterator[str]:
    suites = folder / "acceptance"  # with limits of their own: harness/launch.py
    for path in sorted(folder.rglob("*.py")):
        place, text = path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")
        looked_at = place not in ENDED_BY_OTHERS and not path.is_relative_to(suites)
        if looked_at and any(sign in text for sign in SIGNS):
            yield from (f"{place}:{line}: {kind}" for line, kind in unlimited(ast.parse(text)))


def test_every_wait_of_a_test_has_a_limit():
    assert list(found(TESTS)) == []


BAD = (
    "process.communicate()",
    "process.communicate(b'x')",
    "process.wait()",
    "process.wait(timeout=None)",
    "process.communicate(timeout=None)",
    "for line in iter(process.stdout.readline, ''): pass",
    "while process.poll() is None: time.sleep(1)",
    "lines = process.stderr.readlines()",
    "process.stdout.readline()",
    "process.stderr.read()",
    "for line in process.stdout: pass",
    "x = [line for line in run.process.stderr]",
    "for line in process.stdout or (): pass",
    "while not ready(): time.sleep(1)",
    "while True:\n    sleep(0.1)",
)
GOOD = (
    "process.communicate(timeout=3)",
    "process.wait(3)",
    "' '.join(words)",
    "sys.stdout.read()",
    "while time.monotonic() < end: time.sleep(1)",
    "while not ready():\n    assert monotonic() < end\n    sleep(1)",
    "for line in process.stdout.splitlines(): pass",
)


@pytest.mark.parametrize("text", BAD)
def test_a_wait_without_a_limit_is_found(text, tmp_path):
    (tmp_path / "test_it.py").write_text(text)
    assert len(list(found(tmp_path))) == 1


@pytest.mark.parametrize("text", GOOD)
def test_a_wait_with_a_limit_is_none(text, tmp_path):
    (tmp_path / "test_it.py").write_text(text)
    assert list(found(tmp_path)) == []


def test_a_line_that_never_comes_is_an_error_with_what_came():
    """The program writes two other lines, and then sleeps."""
    run = object.__new__(scripted.Command)
    run.lines = []
    with subprocess.Popen(
        ["sh", "-c", "echo one >&2; echo two >&2; exec sleep 600"], stderr=subprocess.PIPE, text=True
    ) as run.process:
        assert run.until("one")
        begun = time.monotonic()
        with pytest.raises(waits.WaitedTooLongError, match=r"(?s)a line with 'three'.*so far:\none\ntwo"):
            run.until("three", limit_s=1)
        assert time.monotonic() - begun < 300
    assert run.process.returncode < 0, "it was killed"
    with pytest.raises(waits.WaitedTooLongError, match=r"the moon: not within 0.1 s; so far:\nnothing yet"):
        waits.until(lambda: False, "the moon", said=lambda: "nothing yet", limit_s=0.1)


def test_the_end_of_a_program_is_no_line():
    with subprocess.Popen(["sh", "-c", "echo one; exit 3"], stdout=subprocess.PIPE, text=True) as process:
        assert [waits.line(process.stdout), waits.line(process.stdout)] == ["one\n", ""]
