"""The processes of a run: what they load, fork and name, and how readings come back from them."""

import ast
import json
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import vendors
from harness import session, unloaded
from vendors import Absence, cpu, wire
from waits import run_program

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "acceptance"))
DEVICE = vendors.Device(
    index=0,
    uuid="GPU-1",
    bdf="0000:1b:00.0",
    name="a device",
    arch="sm_90",
    compute_units=Absence.NO_PERMISSION,
    memory_bytes=1,
    firmware={"vbios": "96", "kind": Absence.failed("NOT_FOUND")},
    processes=(vendors.Process(pid=0, name="python"),),
    throttle=vendors.Throttle(unfit=("thermal",), accumulators={"thermal": 3}, ticks=9),
)
HOST = vendors.Host(
    vendor="nvidia",
    library="nvml",
    driver="580",
    devices=(DEVICE,),
    links=(vendors.Link(a=0, b=1, kind="nvlink", p2p=True),),
)


@pytest.mark.parametrize(
    "value",
    [HOST, cpu.read(), cpu.sample((0, 1)), Absence.ALL_ONES],
    ids=["host", "cpu", "sample", "absence"],
)
def test_a_reading_comes_back_as_it_was(value):
    found = wire.decoded(json.loads(json.dumps(wire.encoded(value))))
    assert found == value
    assert type(found) is type(value)


def test_an_absence_is_no_text():
    found = wire.decoded(json.loads(json.dumps(wire.encoded(HOST))))
    (device,) = found.devices
    assert isinstance(device.compute_units, Absence)
    assert device.firmware["kind"].is_failure
    assert not isinstance(device.name, Absence)


@pytest.mark.parametrize(
    "text", ['{"!": "Popen"}', '{"!": "Host"}', "{}", '{"!": "Device", "evil": 1}', '{"!": []}']
)
def test_anything_else_is_an_error(text):
    with pytest.raises((KeyError, TypeError, ValueError)):
        wire.decoded(json.loads(text))


ACCEPTANCE = Path(__file__).resolve().parents[2] / "acceptance"
PROGRAM = """
import atexit, os, weakref
from harness import forked

class Held: pass

kept = [Held()]
weakref.finalize(kept[0], print, "made before", flush=True)

def work():
    kept.append(Held())
    weakref.finalize(kept[1], print, "made in the fork", flush=True)
    atexit.register(print, "registered in the fork", flush=True)

if (pid := os.fork()) == 0:
    forked.run(work)
assert os.waitpid(pid, 0)[1] == 0
print("the fork ended", flush=True)
"""


def test_a_fork_finalizes_what_it_made_and_nothing_else():
    environment = {"PYTHONPATH": str(ACCEPTANCE), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = run_program([sys.executable, "-c", PROGRAM], env=environment, check=True)
    before_its_end, _, after = ended.stdout.partition("the fork ended\n")
    assert sorted(before_its_end.splitlines()) == ["made in the fork", "registered in the fork"]
    assert after == "made before\n"


@pytest.mark.parametrize(("chosen", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_unless_the_user_chose(chosen, expected, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")  # so that it is as before when the test ends
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    session._wait_asleep()
    assert os.environ["OMP_WAIT_POLICY"] == expected


# Programs and parts of them that run in children only.
CHILDREN = {"forked.py", "forked_ranks.py", "rank.py", "server_main.py", "worker_main.py"}
OF_CONTROLLER = sorted(
    path
    for folder in ("harness", "vendors")
    for path in (ACCEPTANCE / folder).glob("*.py")
    if path.name not in CHILDREN
)


@pytest.mark.parametrize("path", OF_CONTROLLER, ids=lambda path: path.stem)
def test_nothing_that_the_controller_calls_imports_torch(path):
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    modules = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    modules += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names = {module.partition(".")[0] for module in modules}
    assert not names & set(unloaded.PACKAGES)


def test_a_package_is_installed_only_if_another_finder_finds_it():
    """In a process of its own, where the names stand for packages."""
    program = (
        "from harness import unloaded; unloaded.install(); import torch, triton.language as tl;"
        "names = ('json', 'pytest', 'sys', 'triton', 'no_such_package');"
        "print(*map(unloaded.is_installed, names), tl.constexpr.__name__);"
        "unloaded.remove(); print(importlib.util.find_spec('triton'), 'triton.language' in sys.modules)"
    )
    command = [sys.executable, "-S", "-c", "import importlib.util, sys;" + program]
    printed = run_program(command, cwd=ACCEPTANCE, check=True, timeout=60).stdout
    names = ["True", "False", "True", "False", "False", "triton.language.constexpr"]
    assert printed.split() == [*names, "None", "False"]


def test_a_process_that_has_loaded_torch_gets_no_names_for_parts_of_it(monkeypatch):
    """As in a fork of a process with torch: a name for `torch.testing` would be half of another torch."""
    finder = unloaded._Finder()
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert finder.find_spec("torch")
    assert finder.find_spec("torch.testing")
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    assert not finder.find_spec("torch.testing")
    assert not finder.find_spec("torchvision")


NAMED = re.compile(r'"workloads\.(\w+):(\w+)"')


def test_every_workload_that_a_check_names_is_defined():
    named = {
        (path.name, *found)
        for path in ACCEPTANCE.glob("test_*.py")
        for found in NAMED.findall(path.read_text())
    }
    assert named
    missing = [
        f"{check} calls {module}:{name}"
        for check, module, name in sorted(named)
        if name not in _defined(module)
    ]
    assert not missing, missing


def _defined(module: str) -> set[str]:
    path = ACCEPTANCE / "workloads" / f"{module}.py"
    if not path.exists():
        return set()
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}
