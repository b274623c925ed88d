"""Tests of the trainers themselves; they need torch (and transformers, triton where a test says so)."""

import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

TESTS = Path(__file__).resolve().parents[1]
TRAINERS = TESTS.parent / "trainers"
RESEARCH = TESTS.parent / "benchmarks" / "training"
sys.path[:0] = [str(TRAINERS), str(RESEARCH)]
sys.path.append(str(TESTS / "acceptance"))
sys.dont_write_bytecode = True
# OpenMP reads it while torch is loaded, here and in ranks; threads that wait for a busy core spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402 - after the number of its threads

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported, by any of the test files

from harness.launch import launch  # noqa: E402 - tests/acceptance has to be on the path first
from harness.processes import WorkloadError  # noqa: E402
from harness.server import Server  # noqa: E402
from tools import launch as real  # noqa: E402

Record = Callable[..., dict[str, Any]]
HANGS_S = 3600  # as in pytest.ini: a limit for what hangs, not a measurement


@pytest.fixture(scope="session")
def program(tmp_path_factory) -> Iterator[Callable[..., dict[str, Any]]]:
    """The JSON line of a program on so many ranks, forked from one process that has loaded torch."""
    server = Server(tmp_path_factory.mktemp("server"))
    # Ranks fork only with the server's variables: not with one that a library sets when a test imports it.
    variables = dict(os.environ)

    def run(path: str | Path, ranks: int, *arguments: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        with mock.patch.dict(os.environ, variables, clear=True):
            return launch(
                path,
                arguments,
                nproc=ranks,
                environment={"OMP_NUM_THREADS": variables["OMP_NUM_THREADS"]},  # as the server has it
                timeout_s=HANGS_S,
                folder=folder,
                server=server,
            )

    yield run
    server.stop()


@pytest.fixture(scope="session")
def record(program: Callable[..., dict[str, Any]]) -> Record:
    """The record of train.py on so many ranks."""
    return functools.partial(program, "train.py")


@pytest.fixture(scope="session")
def scales(program: Callable[..., dict[str, Any]]) -> Record:
    """Every FP8 scale of train.py on so many ranks."""
    return functools.partial(program, Path(__file__).with_name("scales.py"))


@pytest.fixture(scope="session")
def gathered(program: Callable[..., dict[str, Any]]) -> Record:
    """The record of train.py on so many ranks, with the bytes that its all-gathers made."""
    return functools.partial(program, Path(__file__).with_name("gathered.py"))


@pytest.fixture
def forked_runs(program: Callable[..., dict[str, Any]], monkeypatch) -> None:
    """What the tools of trainers/ run on this host, as forks: a new process loads torch for seconds."""

    def run(system: real.System, flags: list[str], *, timeout_s: float) -> dict[str, Any]:  # noqa: ARG001  # its own
        words = system.command
        ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        at = next(number for number, word in enumerate(words) if word.endswith(".py"))
        try:
            return program(words[at], ranks, *words[at + 1 :], *flags)
        except WorkloadError as error:
            raise real.RunError(f"{system.name} {error}", 1) from None

    monkeypatch.setattr(real, "run", run)
