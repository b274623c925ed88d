"""Whoever is interrupted leaves no container and no half-published tag, and the next run carries on."""

import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripted import LABEL, REFERENCE, Command, let_pass, let_sleep, make_checkout, stackcheck, tags, verify
from stackcheck.engine.client import Engine

OTHER_SIGNALS = [pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP)]
pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("heard_signals")]


@pytest.fixture
def checkout(tmp_path, scripted_engine: Engine) -> Path:  # noqa: ARG001  # the image has to be there
    return make_checkout(tmp_path / "checkout")


def containers() -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={REFERENCE}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def started(checkout: Path, *arguments: str) -> Command:
    """A command whose suites are running."""
    command = Command(checkout, *arguments)
    assert command.until("stackcheck: the suites run"), command.text
    return command


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHER_SIGNALS])
def test_an_interrupted_suite_run_leaves_no_container_and_the_next_run_carries_on(checkout, number):
    let_sleep(checkout)
    command = started(checkout, "test", REFERENCE)
    assert len(containers()) == 1
    assert command.end(number) == 130
    assert "interrupted; the next run continues" in command.text
    assert containers() == []
    let_pass(checkout)
    code, text = stackcheck(checkout, "test", REFERENCE)
    assert (code, containers()) == (0, []), text


def test_the_second_of_two_commands_waits_and_says_for_what(checkout):
    let_sleep(checkout)
    first = started(checkout, "test", REFERENCE)
    second = Command(checkout, "certify", REFERENCE)
    assert second.until("waiting for stackcheck test (pid "), second.text
    assert f"(pid {first.process.pid})" in second.text
    assert len(containers()) == 1
    let_pass(checkout)
    assert first.end(signal.SIGINT) == 130
    assert second.end() == 0, second.text


@pytest.fixture(scope="module")
def certified_once(tmp_path_factory, scripted_engine: Engine) -> Path:  # noqa: ARG001  # as above
    root = make_checkout(tmp_path_factory.mktemp("certified") / "checkout")
    let_sleep(root)
    started(root, "test", REFERENCE).end(signal.SIGINT)
    let_pass(root)
    code, text = stackcheck(root, "certify", REFERENCE)
    assert code == 0, text
    return root


@pytest.fixture
def certified(certified_once: Path) -> Path:
    """A checkout in which `certify` has left its statements and nothing is published."""
    shutil.rmtree(certified_once / "dist", ignore_errors=True)
    return certified_once


@pytest.mark.parametrize("number", [signal.SIGINT, OTHER_SIGNALS[0]])
@pytest.mark.parametrize(
    "words", ["copying", *(pytest.param(word, marks=pytest.mark.slow) for word in ("attaching", "published"))]
)
def test_an_interrupted_publication_leaves_no_half_published_tag_and_the_next_one_carries_on(
    certified, number, words
):
    command = Command(certified, "publish", REFERENCE)
    assert command.until(words), command.text
    code = command.end(number)
    assert code in {0, 130, -number}  # the last: it was over, and the interpreter was ending
    assert (LABEL in tags(certified)) <= (verify(certified) == 0), "a tag names what does not verify"
    if words == "copying":
        assert (code, tags(certified)) == (130, [])
    assert list((certified / "dist").rglob(".tmp-*")) == []
    code, text = stackcheck(certified, "publish", REFERENCE)
    assert code == 0, text
    assert verify(certified) == 0


def test_an_interruption_while_a_container_is_being_made_leaves_none(scripted_engine, monkeypatch):
    from stackcheck.engine.client import RunSpec

    client: Any = scripted_engine._client
    made = type(client.containers).create

    def interrupted(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(client.containers), "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        scripted_engine.run(RunSpec(image=REFERENCE, command=("python3",)))
    assert containers() == []
