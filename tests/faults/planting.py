"""Plant a fault from outside, run the real suite in a fork (`warm_python`), and see which check catches it.

A fault is data. To add one, put a `Fault` into a table and hand the table to `pytest.mark.parametrize`:

    FAULTS = (
        Fault("one GPU is missing", "test_devices.py::test_device_count", vendor="nvidia",
              nvml={"devices": 3}, says="3"),
        Fault("a zeroed tile", "test_kernels.py::test_gemm",
              patches={"workloads.gemm:product": "lambda *a, **k: original(*a, **k) * 0"}),
    )

    @pytest.mark.parametrize("fault", FAULTS, ids=str)
    def test_planted_fault_is_caught(fault, plant):
        plant(fault)

    def test_healthy(plant):
        plant(Fault("nothing", "test_kernels.py::test_gemm", outcome="passed"))

`check` is a file, a function or one instance of it: every instance that ran must end as `outcome` (for
"failed" at least one), and one reason must hold `says`. What can be planted: `env` variables; `files`, put
first on the import path of pytest and of every child it starts, as are the folders in `paths`; `patches` of
"module:name" by a Python expression in which `original` is the real function; `nvml`, the state that
stubs/pynvml.py shows; and `arguments` for pytest.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from warm_python import Python

FAULTS = Path(__file__).resolve().parent
TESTS = FAULTS.parent
STUBS = FAULTS / "stubs"
TIMEOUT_S = 1800  # for what hangs, not a measurement: a busy machine takes several times as long
CACHES = ("torchinductor_", "pytest-of-")  # what torch and pytest keep in a temporary folder
# Not loaded: pytest's cache, which would write beside the checks, and a plugin for asynchronous tests, which
# comes with the image's transformers and takes a tenth of a second of each run.
LEAN = ("-p", "no:cacheprovider", "-p", "no:anyio")
PLANTED = "stackcheck_planted"  # the name of a report's property

# The suites need torch, stackcheck does not: its tests may run with another Python than the suites.
SUITE_PYTHON = os.environ.get("STACKCHECK_SUITE_PYTHON", sys.executable)
PYTHON = Python(SUITE_PYTHON)

# Where .ci/processors.py plays another processor, what is started here plays it too.
PLAYED = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one.endswith("without_amx")]

# Every Python process that starts with the planted folder first on its path runs this, and so does each fork
# of `warm_python`, where some of the modules are loaded already.
HOOK = """
import importlib.util, json, os, sys
PATCHES = json.loads(os.environ["PLANTED_PATCHES"])

def patch(module):
    for key, source in PATCHES.items():
        owner, _, attribute = key.partition(":")
        if owner == module.__name__:
            holder, *rest = [module, *attribute.split(".")]
            for part in rest[:-1]:
                holder = getattr(holder, part)
            names = {**vars(module), "original": getattr(holder, rest[-1])}
            replacement = eval(source, names)
            for detail in ("__module__", "__name__", "__qualname__"):
                if hasattr(names["original"], detail):
                    setattr(replacement, detail, getattr(names["original"], detail))
            setattr(holder, rest[-1], replacement)
            if not rest[:-1] and getattr(names["original"], "__module__", None) == owner:
                for other in list(sys.modules.values()):  # they took it from here by its name before
                    if getattr(other, "__dict__", {}).get(rest[-1]) is names["original"]:
                        setattr(other, rest[-1], replacement)

class Patcher:  # no importlib.abc: that takes each new Python 50 ms to load
    def find_spec(self, name, path, target=None):
        if not any(key.split(":")[0] == name for key in PATCHES):
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        execute = spec.loader.exec_module
        def patched(module):
            execute(module)
            patch(module)
        spec.loader.exec_module = patched
        return spec

for owner in {key.partition(":")[0] for key in PATCHES} & sys.modules.keys():
    patch(sys.modules[owner])
sys.meta_path.insert(0, Patcher())
"""


@dataclass(frozen=True)
class Fault:
    """One planted fault and the check that has to catch it.

    Attributes:
        another: The check fails by a quick fault already: `make test-slow` plants this one.
    """

    name: str
    check: str
    outcome: str = "failed"
    says: str = ""
    vendor: str = "cpu"
    tier: str = "standard"
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, str] = field(default_factory=dict)
    paths: tuple[str, ...] = ()
    nvml: Mapping[str, Any] | None = None
    arguments: tuple[str, ...] = ()
    another: bool = False

    def __str__(self) -> str:
        return f"{self.name} -> {self.check.rpartition('::')[2]}".replace(" ", "-")


def device_check(function: str) -> str:
    """The id of a check of the device suites, found in whichever of their files has it."""
    for path in sorted(
        [*(TESTS / "acceptance").glob("test_devices*.py"), TESTS / "acceptance/test_memory_after.py"]
    ):
        if f"def {function}(" in path.read_text(encoding="utf-8"):
            return f"{path.name}::{function}"
    raise LookupError(f"no device suite has a check {function}")


def is_fault(value: object) -> bool:
    """Whether a parameter of a test declares what the test plants."""
    return all(hasattr(value, name) for name in ("name", "check", "outcome"))


def declaration(fault: Any) -> dict[str, Any]:
    """What the proof lists about a fault."""
    expected, vendor = fault.outcome, getattr(fault, "vendor", "cpu")
    return {"name": fault.name, "check": fault.check, "vendor": vendor, "expected": expected}


def tell(item: Any, planted: Mapping[str, Any]) -> None:
    """Declare for `proof` what a test plants; a key `caught` gives the result of one fault among many."""
    entry = (PLANTED, json.dumps(dict(planted)))
    if entry not in item.user_properties:
        item.user_properties.append(entry)


def judge_each(item: Any, fault: Fault, result: Mapping[str, Any], says: Mapping[str, str]) -> None:
    """Declare every fault that one run plants, name -> words, and assert that the check's reason has them."""
    (check,) = result["checks"]
    for name, words in says.items():
        tell(item, {**declaration(replace(fault, name=name)), "caught": words in check["reason"]})
    missed = [name for name, words in says.items() if words not in check["reason"]]
    assert not missed, f"{missed} were not caught: {check['reason']}"


def run(fault: Fault, folder: Path) -> dict[str, Any]:
    """The result.json of a run with the fault planted."""
    unreached = [key for key in fault.patches if key.startswith("test_")]
    assert not unreached, f"{unreached}: pytest imports the checks itself, so no patch reaches their modules"
    planted = folder / "planted"
    planted.mkdir()
    for name, text in fault.files.items():
        (planted / name).write_text(text, encoding="utf-8")
    if fault.patches:
        (planted / "sitecustomize.py").write_text(HOOK, encoding="utf-8")
    path = [str(planted), *fault.paths, *([str(STUBS)] if fault.nvml is not None else []), *PLAYED]
    scratch = folder / "scratch"
    scratch.mkdir()
    variables = {
        "PYTHONPATH": os.pathsep.join(path),
        "PLANTED_PATCHES": json.dumps(dict(fault.patches)),
        "STACKCHECK_FAKE_NVML": json.dumps(dict(fault.nvml or {})),
        "STACKCHECK_FAKE_FOLDER": str(planted),
        "TMPDIR": str(scratch),
        "OMP_NUM_THREADS": "1",  # suites run side by side, where waiting threads cost time
        **fault.env,
    }
    out = folder / "out"
    ended = PYTHON.pytest(
        *(str(TESTS / "acceptance" / fault.check), "--gpu-vendor", fault.vendor, "--tier", fault.tier),
        *("--result-dir", str(out), "--lease-dir", str(folder / "leases")),
        *(*LEAN, *fault.arguments),
        env={**os.environ, **variables},
        folder=folder,
        timeout_s=TIMEOUT_S,
    )
    assert (out / "result.json").exists(), ended.stdout + ended.stderr
    left = sorted(path.name for path in scratch.iterdir() if not path.name.startswith(CACHES))
    assert not left, f"the run left {left} in its temporary folder\n{ended.stdout}{ended.stderr}"
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return {**result, "output": ended.stdout + ended.stderr, "exit": ended.returncode}


def program(*words: str, stacks: Path, ranks: int = 0, **env: str) -> dict[str, Any]:
    """The JSON line that a program of this folder prints, alone or as ranks forked from one process."""
    launcher = ("-m", "harness.forked_ranks", str(ranks)) if ranks else ()
    place = os.pathsep.join((str(TESTS / "acceptance"), str(FAULTS), *PLAYED))
    own = {"PYTHONPATH": place, "PYTHONDONTWRITEBYTECODE": "1", "STACKCHECK_STACKS": str(stacks)}
    ended = subprocess.run(
        (SUITE_PYTHON, *launcher, str(FAULTS / words[0]), *words[1:]),
        env={"OMP_NUM_THREADS": "1", **os.environ, **own, **env},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    told: dict[str, Any] = json.loads([line for line in ended.stdout.splitlines() if line[:1] == "{"][-1])
    return told


def judge(fault: Fault, result: Mapping[str, Any]) -> None:
    """Assert that the check ended with the fault's outcome and text."""
    checks = [
        check for check in result["checks"] if check["id"].split("[")[0].startswith(fault.check.split("[")[0])
    ]
    outcomes = [check["outcome"] for check in checks]
    assert checks, result["output"]
    if fault.outcome == "failed":
        assert "failed" in outcomes, f"{fault.name} was not caught: {outcomes}\n{result['output']}"
    else:
        assert set(outcomes) == {fault.outcome}, result["output"]
    reasons = "\n".join(check["reason"] or "" for check in checks)
    assert fault.says in reasons, f"{fault.says!r} is not in {reasons!r}"
