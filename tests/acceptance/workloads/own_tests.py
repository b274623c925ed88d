"""The tests that libraries bring in their own wheels, or unpacked beside the suites. In: a subject, a seed.

Out: what became of each test. One that fails runs once more, alone, and fails if it fails twice.
"""

import argparse
import contextlib
import fnmatch
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from workloads.own_tests_plugin import LINES, SEED
from workloads.time_limits import scaled

ACCEPTANCE = Path(__file__).resolve().parents[1]
KNOWN = Path(__file__).with_name("own_tests_known.json")
LEAST_RANKS = 2
WHOLE_S, TEST_S = 600, 120
REPEAT_S, MOST_REPEATED = 300, 20  # all repetitions; what is not repeated has failed
# So many tests pass at least, so that a module with another name is no silence.
LEAST = {"distributed": 80, "torchao": 250}
CHOSEN = ""  # pytest's -k: all of them. A fault replaces it
NEEDED = {"pytest": "pytest", "xdist": "pytest-xdist", "pytest_timeout": "pytest-timeout"}
# Tests on one GPU share its memory; those that start a process for each device run one by one.
WORKERS = {"cpu": 4, "cuda": 2}
# Ranks of a device load torch anew, because the tests' own decorators ask it before there are ranks: so many
# tests at once, of a rank for each device, and cores for each.
DEVICE_WORKERS, RANK_CORES = 8, 2
LACKS = re.compile(r"No module named '([^'.]+)")
HUNG = ("Timeout (>", "it did not end")  # pytest-timeout's words, and ours
LEFT = {"No working C++ compiler found": "no C++ compiler is here"}
# What images lack, and torch's own test classes import: the base class is all they take from it.
STANDINS = {"expecttest": "import unittest\n\nTestCase = unittest.TestCase\n"}
# How torch's own tests start it, for each backend: a class of a file that its wheel does not have.
DISTRIBUTED = """
import multiprocessing, os, tempfile
if multiprocessing.current_process().name == "MainProcess":  # ranks that load this file have theirs
    os.environ["TEMP_DIR"] = tempfile.mkdtemp()
import torch
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class Subject(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context(os.environ["OWN_TESTS_START"]).Process)
"""


@dataclass(frozen=True)
class Subject:
    """Tests of one library: where they are, and what their process needs."""

    name: str
    tests: str | Path  # a file's text, or a folder
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: int = 1


@dataclass
class Told:
    """What the lines of one run of pytest say."""

    collected: int = 0
    outcomes: dict[str, str] = field(default_factory=dict)  # "began" has no other one: it did not end
    why: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[str, str]] = field(default_factory=dict)  # that were not collected: outcome, why
    ended: str = ""
    output: str = ""

    @classmethod
    def read(cls, lines: Path, ended: str, output: str) -> "Told":
        """What a process wrote before it ended. A failure stays one, whatever follows."""
        told = cls(ended=ended, output=output)
        for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else ():
            with contextlib.suppress(ValueError):  # the last line of a process that was killed
                event = json.loads(line)
                told.collected = event.get("collected", told.collected)
                if "file" in event:
                    told.files[event["file"]] = event["outcome"], event["why"]
                elif "id" in event and told.outcomes.get(event["id"]) != "failed":
                    told.outcomes[event["id"]] = event["outcome"]
                    told.why[event["id"]] = event.get("why", "")
        return told


def kind() -> str:
    """The device of these tests, without a context on it: ranks are forked."""
    return "cuda" if torch.cuda.device_count() else "cpu"


def is_here(module: str) -> bool:
    """Whether this Python has a module; not where this process put something in its place."""
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is loaded, and came from nowhere
        return False


def lacking() -> dict[str, str] | None:
    """What pytest's run needs and this Python has not, for `skips.if_lacking`."""
    absent = [package for module, package in NEEDED.items() if not is_here(module)]
    return {"package": absent[0], "reason": f"this Python has no {', '.join(absent)}"} if absent else None


def distributed(seed: int = 0, *, ranks: int = LEAST_RANKS) -> dict[str, Any]:
    """torch's own tests of collectives and DDP, with gloo on a processor and NCCL or RCCL on GPUs."""
    return judged(_distributed(ranks), seed)


def _distributed(ranks: int) -> Subject:
    cores = len(os.sched_getaffinity(0))
    if kind() == "cuda":
        names = {"BACKEND": "nccl", "OWN_TESTS_START": "spawn"}
        workers = max(1, min(DEVICE_WORKERS, cores // (RANK_CORES * ranks)))
    else:
        names, workers = {"BACKEND": "gloo", "OWN_TESTS_START": "fork"}, max(1, _workers() * 2 // ranks)
    names["WORLD_SIZE"] = str(ranks)
    return Subject("distributed", DISTRIBUTED, names, workers)


def torchao(seed: int = 0) -> dict[str, Any]:
    """torchao's own tests, which its wheel installs beside it."""
    return judged(_torchao(), seed)


def _torchao() -> Subject:
    files = importlib.metadata.files("torchao") or ()
    ours = [Path(str(one.locate())) for one in files if str(one) == "test/__init__.py"]
    if not ours:
        raise LookupError("torchao's wheel has no test/__init__.py: where are its tests?")
    # Without a C++ compiler what is compiled runs as it is written.
    compiler = os.environ.get("CXX") or shutil.which("g++") or kind() == "cuda"
    return Subject("torchao", ours[0].parent, {} if compiler else {"TORCHDYNAMO_DISABLE": "1"}, _workers())


def names_given(folder: str) -> dict[str, Any]:
    """The source distributions of a folder whose packages are installed, or what is wrong with it."""
    try:
        return {"names": [subject.name for subject in _given(Path(folder))]}
    except ValueError as refused:
        return {"refused": str(refused)}


def given(folder: str, name: str, seed: int = 0) -> dict[str, Any]:
    """The tests of one of them."""
    return judged(next(one for one in _given(Path(folder)) if one.name == name), seed)


def _given(folder: Path) -> list[Subject]:
    """Raises `ValueError` if one has not the version that is installed, or none is installed."""
    subjects = []
    if not folder.is_dir():
        raise ValueError(
            f"--own-tests: got {folder}, which the stack's processes do not see; put it into the checkout"
        )
    for place in sorted(folder.iterdir()):
        name, _, version = place.name.rpartition("-")
        if not place.is_dir() or not name:
            continue
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed = importlib.metadata.version(name)
            if installed.partition("+")[0] != version:
                raise ValueError(f"{place} has tests of {name} {version}, but {installed} is installed")
            tests = [place / one for one in ("test", "tests", "testing") if (place / one).is_dir()]
            if not tests:
                raise ValueError(f"{place} has no folder test, tests or testing")
            subjects.append(Subject(place.name, tests[0], {}, _workers()))
    if not subjects:
        raise ValueError(f"{folder} has no folder NAME-VERSION of an installed package")
    return subjects


def _workers() -> int:
    return max(1, min(WORKERS[kind()], len(os.sched_getaffinity(0))))


def judged(subject: Subject, seed: int) -> dict[str, Any]:
    """All tests of a subject, then alone what failed."""
    began, told = time.monotonic(), _run(subject, seed)
    known = [one for one in known_failures() if _is_of(one, subject.name)]
    failed, left, excused = {}, Counter[str](), {}
    for name, why in _failed(told).items():
        if reason := _left(why):
            left[reason] += 1
        elif reasons := [one["reason"] for one in known if fnmatch.fnmatchcase(name, one["id"])]:
            excused[name] = reasons[0]
        else:
            failed[name] = why
    if over := max(0, told.collected - len(told.outcomes)):
        left[f"not begun: {told.ended}"] = over
    once = _passed_alone(subject, [name for name in failed if name not in told.files])
    skipped = Counter(told.why[name] for name, outcome in told.outcomes.items() if outcome == "skipped")
    skipped.update(why for outcome, why in told.files.values() if outcome == "skipped")
    return {
        "subject": subject.name,
        "seed": seed,
        "passed": list(told.outcomes.values()).count("passed") + len(once),
        "failed": [_words(subject, name, why) for name, why in failed.items() if name not in once],
        "hung": sum(any(sign in why for sign in HUNG) for name, why in failed.items() if name not in once),
        "once": once,
        "known": excused,
        "known_no_longer": [one["id"] for one in known if _is_healed(one["id"], told)],
        "skipped": dict(skipped),
        "left": dict(left),
        "ended": told.ended,
        "seconds": time.monotonic() - began,
        "output": "" if told.outcomes else told.output,
    }


def _passed_alone(subject: Subject, names: list[str]) -> list[str]:
    """Those of some tests that pass when they run once more, each in a new process."""
    deadline = time.monotonic() + scaled(REPEAT_S)
    passed = []
    for name in names[:MOST_REPEATED]:
        if time.monotonic() > deadline:
            break
        if _run(subject, 0, name).outcomes.get(name) == "passed":
            passed.append(name)
    return passed


def _failed(told: Told) -> dict[str, str]:
    """Each test that failed or did not end, and each file that was not collected, with its last words."""
    failed = {name: why for name, (outcome, why) in told.files.items() if outcome == "failed"}
    for name, outcome in told.outcomes.items():
        if outcome == "failed":
            failed[name] = told.why[name] or "it says nothing"
        elif outcome == "began":
            failed[name] = f"it did not end: {told.ended}"
    return failed


def _left(why: str) -> str:
    """What this image lacks, where that made a test fail; empty if the stack made it fail."""
    for package in LACKS.findall(why):
        if not is_here(package):
            return f"no {package} is here"
    return next((reason for words, reason in LEFT.items() if words in why), "")


def known_failures() -> list[dict[str, Any]]:
    """The tests that fail on a healthy stack."""
    read: list[dict[str, Any]] = json.loads(KNOWN.read_text(encoding="utf-8"))
    return read


def _is_of(one: Mapping[str, Any], subject: str) -> bool:
    """Whether a known failure was measured with this subject, device and these versions."""
    if one["subject"] != subject or one["on"] != kind():
        return False
    return all(
        fnmatch.fnmatchcase(importlib.metadata.version(name), version)
        for name, version in one["versions"].items()
    )


def _is_healed(pattern: str, told: Told) -> bool:
    """Whether no test of a known failure failed, and one passed."""
    ended = {one for name, one in told.outcomes.items() if fnmatch.fnmatchcase(name, pattern)}
    return "passed" in ended and not ended & {"failed", "began"}


def _words(subject: Subject, name: str, why: str) -> str:
    """How a test failed twice, and how to repeat it."""
    last = "\n".join(f"    {line}" for line in why.strip().splitlines()[-12:])
    ranks = subject.environment.get("WORLD_SIZE", "")
    place = (
        subject.name if isinstance(subject.tests, str) or subject.name == "torchao" else subject.tests.parent
    )
    command = shlex.join(
        ["python3", "-m", "workloads.own_tests", str(place), name, *([ranks] if ranks else [])]
    )
    return f"  {name}\n{last}\n    again, in tests/acceptance: {command}"


@contextlib.contextmanager
def _prepared(subject: Subject) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder that has the tests under their own name, and what is lacking; and the environment for it."""
    with tempfile.TemporaryDirectory(prefix="own-") as made:
        folder = Path(made)
        if isinstance(subject.tests, str):
            (folder / f"test_{subject.name}.py").write_text(subject.tests, encoding="utf-8")
        else:  # a link: nothing else that lies beside the tests is imported
            (folder / subject.tests.name).symlink_to(subject.tests)
        (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
        (folder / "tmp").mkdir()
        for module, text in STANDINS.items():
            if not is_here(module):
                (folder / f"{module}.py").write_text(text, encoding="utf-8")
        path = [str(folder), os.environ.get("PYTHONPATH", ""), str(ACCEPTANCE)]
        own = {"PYTHONPATH": os.pathsep.join(filter(None, path)), "TMPDIR": str(folder / "tmp")}
        more = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        # What tells a worker of the suites that it is one is none of this pytest's.
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        yield folder, {**kept, **own, **more, **subject.environment}


def _run(subject: Subject, seed: int, alone: str = "") -> Told:
    """Run pytest in a child; end it, with all that it started, when its time is over."""
    with _prepared(subject) as (folder, environment):
        lines, output = folder / "lines.jsonl", folder / "output.txt"
        tests = alone or (f"test_{subject.name}.py" if isinstance(subject.tests, str) else subject.tests.name)
        limit_s = scaled(TEST_S if alone else WHOLE_S)
        with output.open("wb") as out:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", tests, "-q", "-p", "workloads.own_tests_plugin"),
                    *("-p", "no:cacheprovider", "--import-mode=importlib", "--tb=short"),
                    *("--rootdir", str(folder)),
                    *("-n", str(1 if alone else subject.workers), "--continue-on-collection-errors"),
                    *("--timeout", f"{scaled(TEST_S):g}", "--max-worker-restart", "20", "-k", CHOSEN),
                ],
                env={**environment, LINES: str(lines), SEED: "0" if alone else str(seed)},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                ended = f"pytest ended with {process.wait(limit_s)}"
            except subprocess.TimeoutExpired:
                ended = f"{limit_s:g} s were over"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return Told.read(lines, ended, output.read_text(encoding="utf-8", errors="replace")[-3000:])


def main() -> int:
    """Run one test of a subject alone, print what it says, and end with 1 if it does not pass."""
    parser = argparse.ArgumentParser(prog="python3 -m workloads.own_tests")
    parser.add_argument("subject", help="distributed, torchao, or a folder NAME-VERSION")
    parser.add_argument("test", help="its id, as a report has it")
    parser.add_argument("ranks", nargs="?", type=int, default=LEAST_RANKS, help="of distributed")
    asked = parser.parse_args()
    if asked.subject in ("distributed", "torchao"):
        subject = _distributed(asked.ranks) if asked.subject == "distributed" else _torchao()
    else:
        folder = Path(asked.subject).resolve()
        try:
            subject = next(one for one in _given(folder.parent) if one.name == folder.name)
        except (ValueError, StopIteration) as refused:
            parser.error(f"subject: got {asked.subject!r}, {str(refused) or 'which is no such folder'}")
    told = _run(subject, 0, asked.test)
    passed = told.outcomes.get(asked.test) in ("passed", "skipped")
    print(_failed(told).get(asked.test, told.output))
    return int(not passed)


if __name__ == "__main__":
    sys.exit(main())
