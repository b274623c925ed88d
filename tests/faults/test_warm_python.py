"""What a fork shares with the Python that has loaded all: patches reach it, and no changed text is hidden."""

import gc
import json
import os
import select
import socket
import sys
from types import ModuleType

import pytest
from _pytest.assertion import rewrite

import planting
import warm_python


def module(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    made = ModuleType(name)
    exec(text, vars(made))
    monkeypatch.setitem(sys.modules, name, made)
    return made


def test_a_patch_reaches_a_loaded_module_and_who_took_its_function_by_name(monkeypatch):
    owner = module("planted_owner", "def work(): return 1", monkeypatch)
    user = module("planted_user", "from planted_owner import work", monkeypatch)
    other = module("planted_other", "def work(): return 5", monkeypatch)
    monkeypatch.setenv("PLANTED_PATCHES", json.dumps({"planted_owner:work": "lambda: original() + 1"}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    exec(planting.HOOK, {})
    assert (owner.work(), user.work(), other.work()) == (2, 2, 5)


def test_a_patch_of_a_name_that_was_passed_on_stays_there(monkeypatch):
    """As in a new Python: who took the function from where it is defined has the real one."""
    owner = module("planted_owner", "def work(): return 1", monkeypatch)
    passed_on = module("planted_front", "from planted_owner import work", monkeypatch)
    monkeypatch.setenv("PLANTED_PATCHES", json.dumps({"planted_front:work": "lambda: original() + 1"}))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    exec(planting.HOOK, {})
    assert (owner.work(), passed_on.work()) == (1, 2)


def test_a_module_is_rewritten_once_and_again_when_its_text_changes(monkeypatch, tmp_path):
    file = tmp_path / "test_known.py"
    file.write_text("VALUE = 1\n", encoding="utf-8")
    monkeypatch.setattr(rewrite, "_rewrite_test", rewrite._rewrite_test)  # put back at the end
    monkeypatch.setattr(warm_python, "_rewritten_by_pytest", lambda: [file])
    warm_python._rewrite_once()
    first, second = (rewrite._rewrite_test(file, None) for _ in range(2))
    assert first is second
    file.write_text("VALUE = 2\n", encoding="utf-8")
    found: dict[str, int] = {}
    exec(rewrite._rewrite_test(file, None)[1], found)
    assert found["VALUE"] == 2


@pytest.mark.parametrize("opened", ["file", "socket", "pipe"])
def test_what_a_fork_inherits_takes_no_number_from_what_it_opens(opened):
    """An object that is freed after the fork closes its number, whoever has that by then."""
    reading, writing = os.pipe()
    owned = {
        "file": lambda: os.fdopen(os.open(os.devnull, os.O_RDONLY)),
        "socket": socket.socket,
        "pipe": lambda: os.fdopen(os.pipe()[0]),
    }[opened]()
    if (pid := os.fork()) == 0:
        code = 1
        try:
            warm_python._close_all_but(0, 1, 2, reading)
            mine = [select.epoll() for _ in range(64)]
            del owned
            gc.collect()
            at_its_end = os.read(reading, 1) == b""  # the fork holds no other end of the pipe
            code = 0 if at_its_end and all(one.poll(0) == [] for one in mine) else 2
        finally:
            os._exit(code)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(reading)


def test_the_modules_of_the_suites_server_are_found_in_its_text():
    assert "torch.distributed.fsdp" in set(warm_python._of_the_suites_server())


def test_a_patch_that_would_reach_nothing_is_refused(tmp_path):
    fault = planting.Fault("x", "test_training.py::test_loss_falls", patches={"test_training:STEPS": "26"})
    with pytest.raises(AssertionError, match="test_training:STEPS"):
        planting.run(fault, tmp_path)
    assert not list(tmp_path.iterdir())
