"""The verbs that make images: their exit codes, what they print, and what they leave alone."""

from pathlib import Path

import pytest

from small_checkout import FakeEngine, call

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")


Capsys = pytest.CaptureFixture[str]


def test_a_host_that_no_stack_is_for_is_exit_3(
    fake_engine: FakeEngine,
    small_checkout: Path,
    capsys: Capsys,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stackcheck.matrix.resolve.load_stacks", lambda *_a: ())
    done = call(capsys, "images", "--root", small_checkout)
    assert done.code == 3
    assert "no stack of the matrix runs on this host (cpu)" in done.err
    assert fake_engine.builds == []


# The verbs that take an image out of here, and that say what is in it.
