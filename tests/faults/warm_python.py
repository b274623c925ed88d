"""A Python that has loaded pytest and torch once, and forks for each run of the suites.

In: one JSON line a run on stdin: {"arguments", "env", "cwd", "stdout", "stderr"}; `arguments` are pytest's.
Out: for each run two lines on stdout, its process id and its exit code. pytest and torch take 1 to 7 s of
processor time to load, and a suite with a fault planted runs some two hundred times.

A patch reaches what is loaded here already (planting.HOOK). A run that changes how Python or torch starts,
or that brings a module in place of a loaded one, starts a Python of its own instead. In a fork, the suites'
server (tests/acceptance/harness/server.py) is a fork too, so the run's children load nothing again.
"""

import ast
import atexit
import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import importlib.metadata
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

TOKEN = "STACKCHECK_CHILD"  # as tests/acceptance/harness/processes.py reads it
TOKEN_LENGTH = 32
HARMLESS = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
IMPORTED = ("torch._dynamo.testing", "torch.distributed.optim")  # by suites that no server's list is for


class Python:
    """The side of the tests: a process of this file, started with `env` when it is first needed."""

    def __init__(self, program: str, **env: str) -> None:
        self._program = program
        self._env = env
        self._process: subprocess.Popen[str] | None = None

    def pytest(
        self, *arguments: str, env: Mapping[str, str], folder: Path, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run pytest in a fork, in `folder`. Raises `TimeoutExpired` as subprocess.run does."""
        process = self._started()
        assert process.stdin is not None
        assert process.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            files = {name: str(Path(outputs, name)) for name in ("stdout", "stderr")}
            request = {"arguments": arguments, "env": dict(env), "cwd": str(folder), **files}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            pid = int(process.stdout.readline())
            with _killed_after(timeout_s, pid) as expired:
                code = int(process.stdout.readline())
            said = {name: Path(path).read_text(errors="replace") for name, path in files.items()}
        command = [self._program, "-m", "pytest", *arguments]
        if expired:
            raise subprocess.TimeoutExpired(command, timeout_s, said["stdout"], said["stderr"])
        return subprocess.CompletedProcess(command, code, said["stdout"], said["stderr"])

    def _started(self) -> "subprocess.Popen[str]":
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [self._program, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", TOKEN: "-" * TOKEN_LENGTH, **self._env},
            )
            atexit.register(self.end)
        return self._process

    def end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            self._process.wait()


@contextlib.contextmanager
def _killed_after(timeout_s: float, pid: int) -> Iterator[list[int]]:
    """Kill a process when its time is over; what is yielded then holds it."""
    expired: list[int] = []

    def kill() -> None:
        expired.append(pid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(timeout_s, kill)
    timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


class ForkedServer:
    """A plugin for pytest: the suites' server is a fork of this process."""

    def __init__(self, address: int) -> None:
        self._address = address  # of this process's token

    def pytest_configure(self) -> None:
        from harness import server  # the suites' conftest put it on the import path

        server.spawn = self._spawn

    def _spawn(self, environment: Mapping[str, str], home: Path, control: socket.socket) -> "Fork":
        if pid := os.fork():
            return Fork(pid)
        from harness import forked, server_main, unloaded

        def serve() -> None:
            unloaded.remove()  # a stack without Triton has none here either
            mark = server_main.Mark(self._address, TOKEN_LENGTH)
            mark.put(environment[TOKEN])
            os.setsid()
            _close_all_but(0, 1, 2, control.fileno())
            _write_to(home / "stdout.txt", home / "stderr.txt")
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # not pytest's capture
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            os.environ.clear()
            os.environ.update(environment)
            sys.path.insert(0, str(Path.cwd()))  # a rank replaces the first place by its program's folder
            server_main.main(control, mark)

        return forked.run(serve)


class Fork:
    """A child of this process, with the methods of Popen that the harness needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, code = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(code) if ended else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + (timeout or 0)
        while self.poll() is None:
            if timeout is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the suites' server", timeout)
            time.sleep(0.01)
        return self.returncode


def token_address() -> int:
    """Where this process's memory has its token; before the environment is changed."""
    library = ctypes.CDLL(None)
    library.getenv.restype = ctypes.c_void_p
    return library.getenv(TOKEN.encode())


def serve() -> None:
    """Fork for each request; returns in the fork, ready to be pytest."""
    _load()
    sys.path.pop(0)  # this file's folder
    loaded = frozenset(sys.modules)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing that a library prints is an answer
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(request, loaded)
            return
        answers.write(f"{pid}\n")
        answers.flush()
        _, status = os.waitpid(pid, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()
    os._exit(0)


def _load() -> None:
    """What most runs would load: pytest with its own plugins, and what the kernels' suites import."""
    from _pytest.config import default_plugins

    for name in default_plugins:
        importlib.import_module(f"_pytest.{name}")
    with contextlib.suppress(ImportError):
        importlib.import_module("torch")
    for name in (*_of_the_suites_server(), *IMPORTED):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _rewrite_once()


def _of_the_suites_server() -> Iterator[str]:
    """The modules that the suites' server loads, from its text: nothing of the harness may be loaded here."""
    tree = ast.parse((Path(__file__).parents[1] / "acceptance" / "harness" / "server_main.py").read_text())
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "MODULES":
            yield from ast.literal_eval(statement.value)


def _rewrite_once() -> None:
    """Rewrite the asserts of the suites and of pytest's plugins here, where each fork has the result.

    pytest keeps rewritten modules in files only where Python may write byte code. A module is rewritten anew
    in the fork if it is not one of these, or if its text has changed.
    """
    from _pytest.assertion import rewrite

    original = rewrite._rewrite_test
    known = {path: (_digest(path), original(path, None)) for path in _rewritten_by_pytest()}

    def rewritten(path: Path, config: Any) -> Any:
        digest, told = known.get(path, (None, None))
        return told if digest == _digest(path) else original(path, config)

    rewrite._rewrite_test = rewritten


def _digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def _rewritten_by_pytest() -> Iterator[Path]:
    """The files that pytest imports in a run of the suites, but for those of a planted suite."""
    tests = Path(__file__).resolve().parents[1]
    yield from (tests / "conftest.py", tests / "acceptance" / "conftest.py")
    yield from (tests / "acceptance").glob("test_*.py")
    for plugin in importlib.metadata.entry_points(group="pytest11"):
        top = plugin.module.partition(".")[0]
        for file in (plugin.dist and plugin.dist.files) or ():
            if file.suffix == ".py" and file.parts[0].removesuffix(".py") == top:
                yield Path(str(file.locate()))


def _become(request: Mapping[str, Any], loaded: frozenset[str]) -> None:
    """Take on a run's environment, output and import path; a planted sitecustomize runs as at a start."""
    _write_to(request["stdout"], request["stderr"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    env = request["env"]
    os.chdir(request["cwd"])
    places = [place for place in env.get("PYTHONPATH", "").split(os.pathsep) if place]
    if _changes_what_is_loaded(env, places, loaded):
        os.execve(sys.executable, [sys.executable, "-m", "pytest", *request["arguments"]], env)
    # As harness/forked.py does, of which nothing may be loaded here.
    for finalizer in list(weakref.finalize._registry):
        finalizer.atexit = False
    os.environ.clear()
    os.environ.update(env)
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    sys.path[:0] = [request["cwd"], *places]
    sys.argv = ["pytest", *request["arguments"]]
    tempfile.tempdir = None
    random.seed()
    for name in ("sitecustomize", "pynvml"):  # a fault's own go first
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _write_to(stdout: str | Path, stderr: str | Path) -> None:
    for number, name in ((1, stdout), (2, stderr)):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


def _close_all_but(*kept: int) -> None:
    """As a new process does: an end of a pipe that stays open here would hide that the other end closed.

    The numbers stay taken. Some belong to objects of the forking process, and one that is freed later would
    close what has its number by then, such as gloo's epoll, whose thread ends the process (SIGABRT).
    """
    faulthandler.disable()  # pytest's, which writes to one of them
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if descriptor not in {*kept, nothing}:
            with contextlib.suppress(OSError):
                os.fstat(descriptor)  # the listing's own is closed again
                os.dup2(nothing, descriptor, inheritable=False)


def _changes_what_is_loaded(env: Mapping[str, str], places: list[str], loaded: frozenset[str]) -> bool:
    """Whether a run needs a Python of its own, for the interpreter's settings or a module loaded here."""
    changed = {name for name, value in env.items() if value != os.environ.get(name)}
    settings = any(name.startswith(("PYTHON", "LD_", "TORCH")) for name in changed.difference(HARMLESS))
    planted = {path.stem for place in places if Path(place).is_dir() for path in Path(place).iterdir()}
    return settings or bool(planted & loaded - {"sitecustomize", "pynvml"})


def _pytest(address: int) -> int:
    """The exit code of `python -m pytest`."""
    import pytest

    return int(pytest.main(sys.argv[1:], plugins=[ForkedServer(address)]))


def _end_at_once(code: int) -> None:
    """Do what an interpreter does at its end, but for freeing all that was loaded before the fork."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    its_token = token_address()
    serve()
    _end_at_once(_pytest(its_token))
