"""The suites run as a number that belongs to nobody on the host."""

import os
import pwd
from types import SimpleNamespace

import pytest

from stackcheck.errors import ConfigurationError
from stackcheck.suite import steering

FIRST = steering.UNUSED.start


@pytest.fixture(autouse=True)
def _as_root(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(steering, "SUBORDINATE", (tmp_path / "subuid", tmp_path / "none"))
    steering._has_account.cache_clear()


def test_it_is_always_the_same_and_no_account_of_this_host():
    number = steering.uid()
    assert number == steering.uid()
    assert number in steering.UNUSED
    assert number not in {entry.pw_uid for entry in pwd.getpwall()}


def test_an_id_of_an_account_is_passed_over(monkeypatch):
    def look_up(number: int) -> object:
        if number <= FIRST + 1:
            return SimpleNamespace(pw_uid=number)
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", look_up)
    assert steering.uid() == FIRST + 2


def test_an_id_that_is_lent_to_a_person_is_passed_over(tmp_path):
    (tmp_path / "subuid").write_text(f"# lent\nperson:{FIRST - 10}:20\nbroken:x:y\nbroken\n")
    assert steering.uid() == FIRST + 10


def test_a_host_without_a_free_id_is_told(tmp_path):
    (tmp_path / "subuid").write_text("person:0:4294967295\n")
    with pytest.raises(ConfigurationError, match="no user id is free"):
        steering.uid()


def test_another_user_runs_as_itself(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert steering.uid() == 1234
