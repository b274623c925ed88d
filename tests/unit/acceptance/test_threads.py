"""OpenMP's threads in the children of a run: they sleep while they wait, and a user may choose otherwise."""

import os

import pytest

from harness import session


@pytest.mark.parametrize(("chosen", "expected"), [(None, "passive"), ("active", "active")])
def test_threads_sleep_unless_the_user_chose(
    chosen: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")  # so that it is as before when the test ends
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    session._wait_asleep()
    assert os.environ["OMP_WAIT_POLICY"] == expected
