"""Which half of tests/ runs: with --gpu-vendor the acceptance suites, without it the tool's own tests."""

import functools
import importlib
import importlib.util
import os
import resource
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
ACCEPTANCE = TESTS / "acceptance"
OWN_TESTS = ("unit", "faults", "integration", "journeys", "trainers")

# More workers would only wait for devices. Each needs a core, and on GPUs another one while it compiles.
MOST_WORKERS, CORES_PER_WORKER = 16, {"amd": 2, "nvidia": 2, "cpu": 1}

LEAST_OPEN_FILES, LEAST_FREE_BYTES = 256, 64 << 20

XDIST = ("xdist", "xdist.plugin")  # its name where pytest found it by itself, and where it was named
LAUNCHER = "runner/launcher.py"  # the end of the path of what stackcheck starts in place of pytest

# The suites may be mounted read-only, and a stale .pyc beside a changed check would hide the change.
# harness.bytecode allows a cache in a folder of the run.
sys.dont_write_bytecode = True


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("stackcheck", "acceptance suites")
    group.addoption(
        "--gpu-vendor",
        choices=("amd", "nvidia", "cpu"),
        help="run the acceptance suites on this vendor's devices",
    )
    group.addoption(
        "--tier",
        choices=("gate", "smoke", "standard", "soak"),
        help="how much to run; by default what certifies: smoke on processors, standard on GPUs; gate: what "
        "finds broken machines",
    )
    group.addoption(
        "--list-checks",
        type=int,
        metavar="N",
        help="print the ids of all checks, with their tiers, for N devices, as JSON; run none",
    )
    group.addoption(
        "--case-seed",
        type=int,
        default=0,
        metavar="N",
        help="draw other generated cases than those that certify, which are of seed 0",
    )
    group.addoption(
        "--own-tests",
        type=Path,
        metavar="DIR",
        help="in soak also run the tests of unpacked source distributions (DIR/flash_attn-2.8.3/tests); "
        "write --own-tests=DIR, or pytest takes the folder for tests",
    )
    group.addoption("--gpus", type=int, metavar="N", help="use only the first N devices")
    group.addoption(
        "--run-file", type=Path, metavar="FILE", help="run.json: facts about the image and the run"
    )
    group.addoption("--result-dir", type=Path, metavar="DIR", help="where to write result.json and evidence")
    group.addoption(
        "--agent",
        type=Path,
        metavar="DIR",
        help="folder with the socket of a container's agent: run every child in that container",
    )
    group.addoption(
        "--lease-dir",
        type=Path,
        metavar="DIR",
        help="folder of the device locks; share it between containers",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """In a whole run, run several files at once, if pytest-xdist is installed (-n 0 turns that off).

    This hook runs before pytest-xdist reads its options. A file whose checks share launches stays in one
    worker.
    """
    if hasattr(config, "workerinput") or not any(map(config.pluginmanager.hasplugin, XDIST)):
        return
    if not config.getoption("gpu_vendor"):
        return
    option = config.option
    if option.numprocesses is None and _is_whole_run(config):
        option.numprocesses = _workers(config.getoption("gpu_vendor"))
    if option.numprocesses and option.dist == "no":
        option.dist, option.loadscopereorder = "loadfile", False


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if sys.flags.optimize:
        raise pytest.UsageError("Python runs with -O, which removes asserts: unset PYTHONOPTIMIZE or drop -O")
    named = [_path(config, argument) for argument in config.args]
    if not config.getoption("gpu_vendor"):
        if any(path.is_relative_to(ACCEPTANCE) for path in named):
            raise pytest.UsageError(
                "tests/acceptance needs --gpu-vendor amd, --gpu-vendor nvidia or --gpu-vendor cpu"
            )
        return
    if any(path.is_relative_to(TESTS / half) for path in named for half in OWN_TESTS):
        raise pytest.UsageError(
            "--gpu-vendor runs tests/acceptance only: drop it to run the tool's own tests"
        )
    if os.pathsep in str(ACCEPTANCE):  # the suites' children find them through PYTHONPATH
        raise pytest.UsageError(f"{ACCEPTANCE}: no path of the suites may have a colon: rename the folder")
    if lacking := _lacking():
        raise pytest.UsageError(f"the machine lacks what every run needs: {lacking}")
    if _lacks_torch(config) and any(path.is_dir() for path in named):
        raise pytest.UsageError(
            f"the acceptance suites need torch, and {sys.executable} has none:"
            " run them in an image (stackcheck test STACK, or stackcheck run IMAGE -- python -m pytest …),"
            " or with a Python that has torch; docs/guides/write-a-check.md shows both"
        )
    _enter_container(config)
    _start_workers_alike(config)
    from harness.session import PLUGIN, AcceptanceSession

    config.pluginmanager.register(AcceptanceSession(config), PLUGIN)


def _lacking() -> str:
    """What no check could run without, and how to get it; empty: nothing is missing."""
    if not Path("/proc/self").exists():
        return "/proc is not mounted: mount -t proc proc /proc"
    if (files := resource.getrlimit(resource.RLIMIT_NOFILE)[0]) < LEAST_OPEN_FILES:
        return f"{files} open files are allowed, {LEAST_OPEN_FILES} are needed: ulimit -n {LEAST_OPEN_FILES}"
    if (free := shutil.disk_usage(folder := tempfile.gettempdir()).free) < LEAST_FREE_BYTES:
        return (
            f"{folder} has {free >> 20} MiB free, {LEAST_FREE_BYTES >> 20} are needed: TMPDIR names another"
        )
    return ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the acceptance checks by `order.scope`. pytest-xdist, which may be absent, has the types."""
    if not config.getoption("gpu_vendor") or config.option.dist != "loadfile":
        return None
    from harness import order
    from harness.session import session_of

    scheduling = importlib.import_module("xdist.scheduler").LoadFileScheduling(config, log)
    scheduling._split_scope = functools.partial(order.scope, device_count=session_of(config).device_count)
    return scheduling


def pytest_report_header(config: pytest.Config) -> str:
    vendor = config.getoption("gpu_vendor")
    if vendor:
        return f"stackcheck: acceptance suites on {vendor}"
    without = "; without tests/trainers: this Python has no torch, `make test` runs them in the cpu image"
    return f"stackcheck: the tool's own tests{without if _lacks_torch(config) else ''}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    own = any(collection_path.is_relative_to(TESTS / half) for half in OWN_TESTS)
    acceptance = collection_path.is_relative_to(ACCEPTANCE)
    if collection_path == TESTS / "trainers" and _lacks_torch(config):
        return True  # the header says so
    return True if (own if config.getoption("gpu_vendor") else acceptance) else None


def _lacks_torch(config: pytest.Config) -> bool:
    """Whether the suites would run in this Python, and it has no torch."""
    return config.getoption("agent") is None and importlib.util.find_spec("torch") is None


def _enter_container(config: pytest.Config) -> None:
    """Run children where `--agent` says; on a bare machine they are this Python's."""
    from harness import bytecode, inside, processes, unloaded

    folder = config.getoption("agent")
    if folder is None:
        bytecode.keep()
    unloaded.install()
    if folder is None:
        return
    processes.enter(inside.Inside(folder, config.getoption("result_dir").resolve()))


def _start_workers_alike(config: pytest.Config) -> None:
    """Start the workers of pytest-xdist by the launcher too, if it started this process."""
    ends = [number for number, word in enumerate(sys.orig_argv) if word.endswith(LAUNCHER)]
    if ends and getattr(config.option, "tx", None):
        command = sys.orig_argv[: ends[0] + 1]
        config.option.tx = [f"popen//python={shlex.join(command)}"] * len(config.option.tx)


def _is_whole_run(config: pytest.Config) -> bool:
    option = config.getoption
    chosen = any(option(name) for name in ("keyword", "markexpr", "collectonly", "usepdb"))
    return not chosen and all(_path(config, a).is_dir() for a in config.args)


def _workers(vendor: str) -> int:
    workers = min(MOST_WORKERS, _cores() // CORES_PER_WORKER[vendor])
    return workers if workers > 1 else 0


def _cores(group: Path = Path("/sys/fs/cgroup")) -> int:
    """The processors that this process may use: by affinity, and by the quota of its container (cgroup v2's
    cpu.max, v1's cpu.cfs_quota_us).
    """
    cores = len(os.sched_getaffinity(0))
    new, old = group / "cpu.max", group / "cpu/cpu.cfs_quota_us"
    if new.is_file():
        quota, period = new.read_text(encoding="utf-8").split()
    elif old.is_file():
        quota, period = (path.read_text().strip() for path in (old, old.with_name("cpu.cfs_period_us")))
    else:
        return cores
    return cores if quota in {"max", "-1"} else max(1, min(cores, int(quota) // int(period)))


def _path(config: pytest.Config, argument: str) -> Path:
    return (config.invocation_params.dir / argument.split("::", maxsplit=1)[0]).resolve()
