"""Faults in a collective, DDP and an optimizer: a few of the libraries' own tests see them.

docs/reference/trust.md says what they do not see: many of them compare no numbers.
"""

import importlib.metadata
import sys
import types

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import own_tests

COLLECTIVES = "test_own_tests.py::test_own_tests_of_collectives"
PACKAGES = "test_own_tests.py::test_own_tests[torchao]"
LEAST = {"workloads.own_tests:LEAST": "{}"}  # of a few tests
SCALED = (
    "lambda x, *a, **k: (original(x, *a, **k), x.is_floating_point() and x.mul_(1.01))[0]"  # of floats alone
)
FORGETS = "lambda p, grad, step, first, *rest: original(p, grad, step, first.float(), *rest)"


def planted(name: str, check: str, chosen: str, patches: dict[str, str], says: str) -> Fault:
    """A few of the tests show it; all of them take minutes."""
    patches = {**LEAST, "workloads.own_tests:CHOSEN": repr(chosen), **patches}
    return Fault(name, check, patches=patches, says=says, tier="soak")


FAULTS = (
    planted(
        "a sum of floats is 1 % too large",
        COLLECTIVES,
        "sparse_all_reduce_sum or all_reduce_max",
        {"torch.distributed.distributed_c10d:all_reduce": SCALED},
        "test_sparse_all_reduce_sum",
    ),
    planted(
        "DDP always synchronizes",
        COLLECTIVES,
        "no_sync",
        {
            "torch.nn.parallel.distributed:DistributedDataParallel.no_sync": (
                "lambda self: __import__('contextlib').nullcontext()"
            )
        },
        "no_sync",
    ),
    planted(
        "an optimizer forgets its first moment",
        PACKAGES,
        "stochastic_round_correctness",
        {"torchao.optim.adam:single_param_adam": FORGETS},
        "stochastic_round_correctness",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.slow
@pytest.mark.parametrize("check", [COLLECTIVES, PACKAGES])
def test_healthy(check, plant):
    plant(Fault("nothing", check, outcome="passed", tier="soak"))


ENDS = """
import os, pathlib, time
import pytest

def test_passes(): pass
def test_fails(): assert 1 == 2
def test_fails_once():
    mark = pathlib.Path(__file__).with_name("mark")
    seen = mark.exists()
    mark.touch()
    assert seen
def test_crashes(): os.abort()
def test_hangs(): time.sleep(600)
def test_lacks(): import a_module_of_nobody
@pytest.mark.skip(reason="no reason")
def test_skipped(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_known(n): assert n == 1
"""
KNOWN = {
    "subject": "ends", "on": "cpu", "versions": {"torch": "*"}, "id": "tests/test_ends.py::test_known*",
    "reason": "why",
}  # fmt: skip
LIMITS_S = (8, 30, 110)  # a busy machine begins late
HEALED, OLD = ({**KNOWN, **more} for more in ({"id": "*passes"}, {"id": "*", "versions": {"torch": "0.*"}}))


def test_a_module_that_stands_in_for_another_is_not_here(monkeypatch):
    """As drawn operators leave one in their process."""
    monkeypatch.setitem(sys.modules, "expecttest", types.ModuleType("expecttest"))
    assert not own_tests.is_here("expecttest")
    assert own_tests.is_here("torch")
    assert not own_tests.is_here("a_module_of_nobody")


def ends(folder, limit_s, monkeypatch):
    """What is told of tests that end in each way; all of them begin within a limit that suits the machine."""
    (folder / "tests").mkdir(parents=True)
    for name, text in {
        "ends": ENDS,
        "lacking": "import a_module_of_nobody",
        "broken": "import torch.a_module_of_nobody",
    }.items():
        (folder / f"tests/test_{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(own_tests, "TEST_S", limit_s)
    monkeypatch.setattr(own_tests, "known_failures", lambda: [KNOWN, HEALED, OLD])
    told = own_tests.judged(own_tests.Subject("ends", folder / "tests", {}, 2), seed=3)
    failed = sorted(one.split()[0].rpartition("_")[2] for one in told["failed"])
    names = ("hung", "once", "known", "known_no_longer", "passed", "left")
    return failed, [told[name] for name in names], len(told["skipped"])


def test_each_end_of_a_test_is_told(tmp_path, monkeypatch):
    known, lacks = {"tests/test_ends.py::test_known[2]": "why"}, {"no a_module_of_nobody is here": 2}
    once = ["tests/test_ends.py::test_fails_once"]
    wanted = ["broken.py", "crashes", "fails", "hangs"], [1, once, known, [HEALED["id"]], 3, lacks], 1
    for limit_s in LIMITS_S:
        told = ends(tmp_path / str(limit_s), limit_s, monkeypatch)
        if told == wanted:
            break
    assert told == wanted


def test_a_hang_of_all_is_ended(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    text = "import time\n\ndef test_hangs(): time.sleep(600)\ndef test_waits(): pass\n"
    (tmp_path / "tests/test_ends.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(own_tests, "REPEAT_S", -1)
    for limit_s in LIMITS_S:
        monkeypatch.setattr(own_tests, "WHOLE_S", limit_s)
        told = own_tests.judged(own_tests.Subject("ends", tmp_path / "tests"), seed=0)
        if told["failed"]:
            break
    assert "test_hangs" in told["failed"][0]
    assert told["left"] == {f"not begun: {limit_s} s were over": 1}


def test_only_tests_of_the_installed_version_run(tmp_path):
    version = importlib.metadata.version("pytest")
    (tmp_path / f"pytest-{version}" / "tests").mkdir(parents=True)
    (tmp_path / "nobody_has_this-1.0" / "tests").mkdir(parents=True)
    assert own_tests.names_given(str(tmp_path)) == {"names": [f"pytest-{version}"]}
    (tmp_path / "torch-0.1" / "test").mkdir(parents=True)
    assert "has tests of torch 0.1, but" in own_tests.names_given(str(tmp_path))["refused"]
    assert "do not see" in own_tests.names_given(str(tmp_path / "absent"))["refused"]


@pytest.mark.parametrize(("asked", "says"), [("absent-1", "no such folder"), ("absent/x-1", "do not see")])
def test_a_subject_that_is_none_is_refused(asked, says, tmp_path, monkeypatch, capsys):
    (tmp_path / f"pytest-{importlib.metadata.version('pytest')}" / "tests").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["own_tests", str(tmp_path / asked), "test_x"])
    with pytest.raises(SystemExit, match="2"):
        own_tests.main()
    assert says in capsys.readouterr().err
