"""Drawn environments find faults that need a variable, in the suite or on made-up devices; else all pass.

A fault is planted in every job's process, and looks at the variables that it has. It knows no judge.
"""

import json
import os
import subprocess
import sys

import pytest

import planting
from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")

sys.path.insert(0, str(TESTS / "acceptance"))

CHECK = "test_environments.py::test_generated_environments"
WORKLOADS = "workloads.generated_environments"
FEW = {f"{WORKLOADS}:PLANS": "{'cpu': Plan(2, 2, 0)}"}
SET = "__import__('os').environ.get"


def fault(name: str, says: str, case: dict[str, str], patches: dict[str, str], **more: bool) -> Fault:
    """A fault in the first drawn case, which sets these variables; the second one is drawn."""
    one = f"lambda of, seed, number, *a: {case} if number == 1 else original(of, seed, number, *a)"
    return Fault(
        name, CHECK, says=says, tier="soak", patches={f"{WORKLOADS}:draw": one} | FEW | patches, **more
    )


FAULTS = (
    fault(
        "a sum is wrong where two variables are set",
        "all_reduce",
        {"OMP_DYNAMIC": "false", "OMP_PLACES": "cores", "MKL_DYNAMIC": "FALSE"},
        {"torch.distributed:all_reduce": f"lambda t, *a, **k: (original(t, *a, **k), {SET}('OMP_PLACES') and "
         f"{SET}('OMP_DYNAMIC') and t.numel() > 3 and t.view(-1)[3:4].zero_())[0]"},
        another=True,
    ),
    fault(
        "gradients are scaled where a variable is set",
        "times as far off as roundings",
        {"MKL_CBWR": "COMPATIBLE"},
        {"torch.nn.functional:cross_entropy":
         f"lambda *a, **k: original(*a, **k) * (1.001 if {SET}('MKL_CBWR') == 'COMPATIBLE' else 1.0)"},
        another=True,
    ),
    fault(
        "rank 1 never enters a broadcast where a variable is set",
        "did not end: case ",
        {"GLOO_SOCKET_IFNAME": "lo"},
        {
            "workloads.time_limits:scaled": "lambda limit_s: 3.0 if limit_s == 30.0 else original(limit_s)",
            "torch.distributed:broadcast": "lambda t, *a, **k: (__import__('time').sleep(300) if "
            f"{SET}('GLOO_SOCKET_IFNAME') and get_rank() == 1 else None, original(t, *a, **k))[1]",
        },
        another=True,
    ),
)  # fmt: skip
# Devices that a machine without any makes up: they obey as ROCm's documentation says.
MADE_UP = [f"GPU-{number:016x}" for number in range(0xA0, 0xA4)]
OBEYS = (
    "lambda: [{'uuid': one} for one in (lambda g, e: g.promised(%s, g.table(%r).levels, e))("
    "__import__('workloads.generated_environments', fromlist=['promised']), __import__('os').environ)][%s:]"
)


@pytest.mark.parametrize("planted", FAULTS, ids=str)
def test_planted_fault_is_caught(planted, plant):
    """What is printed repeats the fault by the variables that it needs, and no others."""
    reasons = " ".join(check["reason"] for check in plant(planted)["checks"])
    if "two variables" in planted.name:
        assert "'OMP_DYNAMIC=false' 'OMP_PLACES=cores'" in reasons
        assert "MKL_DYNAMIC" not in reasons.partition("again:")[2]


def check(vendor: str, folder, numbers: list[int], hidden: str = "0") -> list[list[str]]:
    """What is wrong with cases of seed 0 on devices that are made up, of which the first one is not ours."""
    (folder / "sitecustomize.py").write_text(planting.HOOK, encoding="utf-8")
    patches = {"workloads.devices:seen": OBEYS % (MADE_UP, vendor, hidden)}
    ours = {"amd": "ROCR_VISIBLE_DEVICES", "nvidia": "CUDA_VISIBLE_DEVICES"}[vendor]
    path = os.pathsep.join((str(folder), str(TESTS / "acceptance")))
    program = (
        "import json, sys; from workloads import generated_environments as g; b = g.Bench(sys.argv[1], 0); "
        "print(json.dumps([b.failures(n, g.draw(b.table, 0, n, b.native, b.leased))[0] "
        "for n in map(int, sys.argv[2:])]))"
    )
    own = {"PYTHONPATH": path, ours: ",".join(MADE_UP[1:]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        (planting.SUITE_PYTHON, "-c", program, vendor, *map(str, numbers)),
        env={**os.environ, **own, "PLANTED_PATCHES": json.dumps(patches)},
        capture_output=True,
        text=True,
        timeout=planting.TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found: list[list[str]] = json.loads(ended.stdout.splitlines()[-1])
    return found


def choices(vendor: str) -> dict[int, set[str]]:
    """Which variables choose devices in drawn cases that do so, by number."""
    from workloads import generated_environments

    of = generated_environments.table(vendor)
    drawn = {n: generated_environments.draw(of, 0, n, MADE_UP, MADE_UP[1:]) for n in range(200)}
    return {number: names for number, case in drawn.items() if (names := {*case} & {*of.visibility})}


def test_a_device_that_two_variables_hide_is_missed(suite_python, tmp_path, request):
    """Parsl/parsl#3858: a launcher sets the variables of two levels, and a device is gone."""
    assert suite_python
    both = {"ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"}
    drawn = choices("amd").items()
    one = next(number for number, names in drawn if names == both)
    other = next(number for number, names in drawn if not both <= names)
    hidden = " and ".join(f"{SET}({name!r})" for name in both)
    caught, healthy = check("amd", tmp_path, [one, other], f"int(bool({hidden}))")
    entry = {"name": "two variables hide a device", "check": CHECK, "vendor": "amd", "expected": "failed"}
    planting.tell(request.node, {**entry, "caught": bool(caught)})
    assert "are promised" in caught[0]
    assert not healthy


@pytest.mark.slow
@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_devices_that_obey_pass(vendor, suite_python, tmp_path):
    """Spellings that are drawn show what the documentation says."""
    assert suite_python
    assert check(vendor, tmp_path, [*choices(vendor)][:3]) == [[], [], []]
