"""Whoever is interrupted leaves no container and no half-published tag, and the next run carries on."""

from __future__ import annotations

import datetime as dt
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import result_files
from small_images import CONFIG_TYPE, LAYER_TYPE, put, quiet
from stackcheck import host_setup, matrix
from stackcheck.engine import Engine
from stackcheck.layout import OciLayout
from stackcheck.oci import OCI_MANIFEST, Manifest, compact_json, sha256

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = "stackcheck-test/suites:bad-days"
LABEL = "stackcheck-test-suites-bad-days"
# Stands for python3 and its pytest: it sleeps for ever while the suites hold a file `slow`, and otherwise
# hands over the result that lies among them, under the id that run.json gives to this run.
PYTHON = r"""#!/bin/bash
if [ "${*: -1}" = /stackcheck/inventory.py ]; then # what is in the image
    echo '{"kind": "python", "place": "/usr", "head": "Name: torch\nVersion: 2.13.0"}'
    echo '{"kind": "end", "folders": 1, "unread": []}'
    exit
fi
echo "stackcheck: the suites run"
if [ -e /stackcheck/tests/acceptance/slow ]; then exec sleep 300; fi
told=$(</stackcheck/run.json)
[[ $told =~ \"run_id\":\ \"([0-9a-f]+)\" ]]
answer=$(</stackcheck/tests/acceptance/answer.json)
echo "${answer//RUN_ID/${BASH_REMATCH[1]}}" > /stackcheck/out/result.json
"""
BALLAST_BYTES = 48 << 20  # what there is to copy while somebody presses Ctrl-C


def layer() -> bytes:
    """A shell and `sleep` of this host, with the libraries that they name, and the program above."""
    programs = [Path(shutil.which(name) or "") for name in ("bash", "sleep")]
    found = {str(path): path for path in programs}
    for program in programs:
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        found |= {word: Path(word) for word in listed.split() if word.startswith("/")}
    files = {name: path.resolve().read_bytes() for name, path in found.items()}
    files["/bin/bash"] = files[str(programs[0])]
    files["/usr/bin/python3"] = PYTHON.encode()
    files["/ballast"] = os.urandom(BALLAST_BYTES)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, body in sorted(files.items()):
            entry = tarfile.TarInfo(name.lstrip("/"))
            entry.size, entry.mode = len(body), 0o755
            tar.addfile(entry, io.BytesIO(body))
    return buffer.getvalue()


def make_layout(folder: Path) -> None:
    layout, body = OciLayout(folder), layer()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/bin"]},
        "rootfs": {"type": "layers", "diff_ids": [sha256(body)]},
        "history": [{"created_by": "a test"}],
    }
    with layout.writing(quiet):
        document = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": put(layout, CONFIG_TYPE, compact_json(config)),
            "layers": [put(layout, LAYER_TYPE, body)],
        }
        layout.write_manifest(Manifest(media_type=OCI_MANIFEST, body=compact_json(document)), "candidate")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A real engine that has the image."""
    host_setup.ensure_engine(quiet)
    found = Engine.connect()
    folder = tmp_path_factory.mktemp("image")
    make_layout(folder / "oci")
    found.load(folder / "oci", REFERENCE)
    yield found
    found.remove(REFERENCE)


@pytest.fixture(scope="module", autouse=True)
def heard_signals() -> Iterator[None]:
    """What is ignored here is ignored by every child: so it is under nohup, or behind a shell's `&`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def checkout(tmp_path: Path, engine: Engine) -> Path:  # noqa: ARG001  # the image has to be there
    return make_checkout(tmp_path / "checkout")


def make_checkout(root: Path) -> Path:
    """A checkout whose suites are an answer that is passed on."""
    (root / "tests" / "acceptance").mkdir(parents=True)
    (root / "trainers").mkdir()
    shutil.copy(ROOT / "matrix.yaml", root)
    shutil.copytree(ROOT / "images", root / "images")
    for name in ("conftest.py", "pytest.ini"):
        (root / "tests" / name).write_text("")
    return root


def let_pass(checkout: Path) -> None:
    """Give the suites a healthy result to hand over; their image and host are the ones of the last run."""
    told = json.loads((checkout / "build" / LABEL / "run.json").read_text())
    now = dt.datetime.now(dt.UTC).isoformat()
    checks = [result_files.check(name) for name in matrix.load(checkout / "matrix.yaml").required["cpu"]]
    same = {name: told[name] for name in ("tier", "stack_id", "image", "inputs", "host")}
    document = result_files.result(*checks, **same, run_id="RUN_ID", started=now, finished=now)
    (checkout / "tests" / "acceptance" / "answer.json").write_text(json.dumps(document))
    (checkout / "tests" / "acceptance" / "slow").unlink(missing_ok=True)


def let_sleep(checkout: Path) -> None:
    (checkout / "tests" / "acceptance" / "slow").touch()


class Command:
    """A `stackcheck` of its own process, whose progress is read while it runs."""

    def __init__(self, checkout: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "stackcheck", *arguments]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=checkout,
            env=home(checkout),
        )
        self.lines: list[str] = []

    def until(self, words: str) -> bool:
        """Read progress up to a line with these words; False when the program ended before it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            if words in line:
                return True
        return False

    def end(self, number: signal.Signals | None = None) -> int:
        if number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=60)
        self.lines += [err, out]
        assert "Traceback" not in self.text
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.lines)


def home(checkout: Path) -> dict[str, str]:
    """The environment with a key of the test's own."""
    path = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "XDG_CONFIG_HOME": str(checkout.parent / "config"), "PYTHONPATH": path}


def stackcheck(checkout: Path, *arguments: str) -> tuple[int, str]:
    command = Command(checkout, *arguments)
    code = command.end()
    return code, command.text


def containers() -> list[str]:
    command = ["docker", "ps", "--all", "--quiet", "--filter", f"ancestor={REFERENCE}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def started(checkout: Path, *arguments: str) -> Command:
    """A command whose suites are running."""
    command = Command(checkout, *arguments)
    assert command.until("stackcheck: the suites run"), command.text
    return command


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_suite_run_leaves_no_container_and_the_next_run_carries_on(
    checkout: Path, number: signal.Signals
) -> None:
    let_sleep(checkout)
    command = started(checkout, "test", REFERENCE)
    assert len(containers()) == 1
    assert command.end(number) == 130
    assert "interrupted; the next run carries on" in command.text
    assert containers() == []
    let_pass(checkout)
    code, text = stackcheck(checkout, "test", REFERENCE)
    assert (code, containers()) == (0, []), text


def test_the_second_of_two_commands_waits_and_says_for_what(checkout: Path) -> None:
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
def certified_once(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Path:  # noqa: ARG001  # as above
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


def verify(checkout: Path) -> int:
    host = ("--device-model", "CPU", "--driver", "none")
    return stackcheck(checkout, "verify", f"oci:dist:{LABEL}", *host)[0]


def tags(checkout: Path) -> list[str]:
    if not (checkout / "dist" / "index.json").exists():
        return []
    return [name for name in OciLayout(checkout / "dist").tags() if name.startswith(LABEL)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("words", ["copying", "attaching", "published"])
def test_an_interrupted_publication_leaves_no_half_published_tag_and_the_next_one_carries_on(
    certified: Path, number: signal.Signals, words: str
) -> None:
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


def test_an_interruption_while_a_container_is_being_made_leaves_none(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stackcheck.engine import RunSpec

    client: Any = engine._client
    made = type(client.containers).create

    def interrupted(self: Any, *arguments: Any, **options: Any) -> None:
        made(self, *arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(client.containers), "create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.run(RunSpec(image=REFERENCE, command=("python3",)))
    assert containers() == []
