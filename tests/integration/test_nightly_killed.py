"""A night that is killed while the suites run, on a real engine: the next one removes its container."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

import scripted
import waits
from scripted import LABEL, Command, let_sleep, make_checkout, stackcheck, tags, verify
from stackcheck.engine.client import Engine

pytestmark = pytest.mark.integration


def containers_of(pid: int) -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"label=org.stackcheck.run={pid}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def let_pass(checkout: Path, folder: str) -> None:
    """Prepare a healthy result, with the image and host of the last run in a folder."""
    last = checkout / "build" / LABEL
    last.mkdir(parents=True, exist_ok=True)
    (last / "run.json").write_bytes((checkout / folder / "run.json").read_bytes())
    scripted.let_pass(checkout)


@pytest.fixture
def published(tmp_path, scripted_engine: Engine) -> Path:  # noqa: ARG001  # the image has to be there
    """A checkout that has certified and published the scripted image."""
    checkout = make_checkout(tmp_path / "checkout")
    assert (
        stackcheck(checkout, "test", scripted.REFERENCE)[0] != 0
    )  # there is no answer yet; it writes run.json
    scripted.let_pass(checkout)
    for verb in ("certify", "publish"):
        code, text = stackcheck(checkout, verb, scripted.REFERENCE)
        assert code == 0, text
    return checkout


def test_a_killed_night_leaves_a_container_that_the_next_one_removes(published):
    let_sleep(published)
    command = Command(published, "nightly")
    assert command.until("suites start"), command.text
    pid = command.process.pid
    _wait_for_container(pid, command)
    assert command.end(signal.SIGKILL) == -signal.SIGKILL

    plan = json.loads((published / "build/nightly/plan.json").read_text())
    assert plan["items"][0]["runs"] == []
    let_pass(published, f"build/nightly/runs/{LABEL}")
    code, text = stackcheck(published, "nightly")
    assert (code, containers_of(pid)) == (0, []), text
    assert f"continuing the night {plan['night']}" in text
    assert "1 renewed" in text
    assert not (published / "build/nightly/plan.json").exists()
    assert verify(published) == 0
    assert LABEL in tags(published)


def _wait_for_container(pid: int, command: Command) -> None:
    def looks() -> bool:
        assert command.process.poll() is None, command.text
        return containers_of(pid) != []

    waits.until(looks, "a container of the night", said=lambda: command.text)
