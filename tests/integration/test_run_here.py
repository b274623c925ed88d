"""`stackcheck run` on a real engine: a verified image behaves like a program of this host."""

import datetime as dt
import functools
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shell_image
import waits
from small_images import STACK_ID, SmallImage, certify, new_key, quiet
from stackcheck.certificate import keys, publish
from stackcheck.engine.client import Engine
from stackcheck.oci.layout import OciLayout

pytestmark = pytest.mark.integration
ROOT = Path(__file__).resolve().parents[2]
# Counts from its checkpoint on; a signal makes it write one and exit with 1, as the trainers do.
TRAINER = """\
step=0; [ -e checkpoint ] && read step < checkpoint && echo "resumed from $step"
trap 'sleep 1; echo $step > checkpoint; echo "stopped at $step"; exit 1' TERM INT HUP
echo started
while :; do step=$((step + 1)); sleep 0.1; done
"""


class Job:
    """`stackcheck run` of the image, from a folder of its own."""

    def __init__(self, reference: str, public: Path, folder: Path) -> None:
        self.reference, self.public, self.folder = reference, public, folder

    def words(self, *options: str) -> list[str]:
        host = ("--device-model", "CPU", "--driver", "none", "--key", str(self.public))
        return [sys.executable, "-m", "stackcheck", "run", self.reference, *host, *options]

    def start(self, *words: str, options: tuple[str, ...] = (), **changes: Any) -> subprocess.Popen[bytes]:
        piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = {**os.environ, "PYTHONPATH": str(ROOT), **changes.pop("env", {})}
        command = [*self.words(*options), "--", *words]
        return subprocess.Popen(command, cwd=self.folder, env=env, **{**piped, **changes})

    def run(
        self,
        *words: str,
        given: bytes = b"",
        options: tuple[str, ...] = (),
        env: dict[str, str] | None = None,
    ) -> tuple[int, bytes, bytes]:
        process = self.start(*words, options=options, stdin=subprocess.PIPE, env=env or {})
        out, err = process.communicate(given, timeout=300)
        assert b"Traceback" not in err, err
        return process.returncode, out, err

    def sh(self, script: str, **options: Any) -> tuple[int, bytes, bytes]:
        return self.run("bash", "-c", script, **options)


@pytest.fixture(scope="module")
def published(engine: Engine, tmp_path_factory) -> Iterator[tuple[str, Path]]:
    folder, key = tmp_path_factory.mktemp("published"), new_key()
    files = {"/unique": uuid.uuid4().bytes}
    shell_image.make_layout(folder / "oci", programs=("bash", "sleep", "cat", "id", "stty"), files=files)
    manifest = OciLayout(folder / "oci").only_manifest()
    (config,) = manifest.descriptors("config")
    image = SmallImage(folder / "oci", manifest.digest, config.digest)
    told: dict[str, Any] = {"public_key": key.public_key(), "report": quiet, "key": key}
    envelopes = certify(image, key, now=dt.datetime.now(dt.UTC))
    publish.publish(image.layout, tag=STACK_ID, envelopes=envelopes, target=f"oci:{folder}/dist", **told)
    (folder / "publisher.pub").write_bytes(keys.public_pem(key.public_key()))
    yield f"oci:{folder}/dist:{STACK_ID}", folder / "publisher.pub"
    name = f"stackcheck/{STACK_ID}:{config.digest[7:19]}"
    if engine.has(name):
        engine.remove(name)


@pytest.fixture
def job(published: tuple[str, Path], tmp_path) -> Job:
    return Job(*published, tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGINT, signal.SIGHUP)),
    ],
    ids=lambda number: number.name,
)
def test_a_signal_lets_the_job_write_a_checkpoint_from_which_the_next_run_resumes(job, number):
    first = job.start("bash", "-c", TRAINER)
    assert waits.line(first.stdout) == b"started\n"
    time.sleep(1)  # some steps
    first.send_signal(number)
    out, err = first.communicate(timeout=300)
    step = int((job.folder / "checkpoint").read_text())
    assert (first.returncode, out) == (1, b"stopped at %d\n" % step), err
    assert step > 0
    second = job.start("bash", "-c", TRAINER)
    assert waits.line(second.stdout) == b"resumed from %d\n" % step
    second.send_signal(signal.SIGTERM)
    second.communicate(timeout=300)
    assert int((job.folder / "checkpoint").read_text()) >= step


def test_a_job_that_does_not_end_after_a_signal_is_killed_after_the_stop_timeout(job):
    stubborn = job.start(
        "bash", "-c", "trap '' TERM; echo started; while :; do sleep 1; done", options=("--stop-timeout", "2")
    )
    waits.line(stubborn.stdout)
    stubborn.send_signal(signal.SIGTERM)
    stubborn.communicate(timeout=300)
    assert stubborn.returncode == 137


# 7 is any code, 125 is one that Docker gives too.
@pytest.mark.parametrize("code", [7, 125, *(pytest.param(code, marks=pytest.mark.slow) for code in (0, 255))])
def test_the_exit_code_is_the_program_s_own(job, code):
    assert job.sh(f"exit {code}")[0] == code


def test_what_cannot_be_started_and_what_is_refused_have_codes_of_their_own(job):
    assert job.run("no-such-program")[0] == 127
    assert job.run("/")[0] == 126
    refused = Job(job.reference, job.public.parent / "missing.pub", job.folder)
    assert refused.sh("exit 0")[0] == 125
    for options in (("--volume", "/nowhere:/x"), ("--user", "root"), ("--shm-size", "x")):
        assert job.sh("exit 0", options=options)[0] == 125


def test_input_output_and_errors_are_those_of_the_program_byte_for_byte(job):
    given = bytes(range(256)) * 1000
    code, out, err = job.sh("cat; echo problem >&2; printf 'a\\rb'", given=given)
    assert (code, out) == (0, given + b"a\rb")
    assert err.endswith(b"problem\n")
    assert b"problem" not in out


def test_a_bar_without_a_line_break_arrives_at_once(job):
    """The program waits for the answer to what it has printed."""
    process = job.start("bash", "-c", "printf '10%%\\r'; read word; echo $word", stdin=subprocess.PIPE)
    assert process.stdout
    assert process.stdin
    assert waits.answer(functools.partial(process.stdout.read, 4), "the bar") == b"10%\r"
    out, _ = process.communicate(b"seen\n", timeout=300)
    assert out == b"seen\n"


def test_each_opening_is_a_word_and_without_it_all_is_closed(job, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "x").write_text("of the data")
    (tmp_path / "vars").write_text("# words\nONE=1\nTWO=of the file\nFROM_HERE\n")
    told = "echo ${ONE-no} ${TWO-no} ${FROM_HERE-no} ${HIDDEN-no}; id -u; echo $PWD"
    mine = {"FROM_HERE": "here", "HIDDEN": "hidden"}
    closed = job.sh(told, env=mine)[1].decode().split("\n")
    assert closed == ["no no no no", str(os.getuid()), "/workspace", ""]
    options = ("--env-file", str(tmp_path / "vars"), "-e", "TWO=a b", "--user", "1234:1234", "-w", "/tmp")
    opened = job.sh(told, options=options, env=mine)[1].decode().split("\n")
    assert opened == ["1 a b here no", "1234", "/tmp", ""]
    data = ("-v", f"{tmp_path / 'data'}:/data:ro")
    assert job.sh("cat /data/x; echo y 2>/dev/null > /data/y || echo refused", options=data)[1] == (
        b"of the datarefused\n"
    )
    interfaces = "while read line; do case $line in *:*) echo ${line%%:*};; esac; done < /proc/net/dev"
    assert set(job.sh(interfaces)[1].split()) == {b"lo"}
    assert len(job.sh(interfaces, options=("--network", "bridge"))[1].split()) > 1


def test_a_terminal_is_one_inside_too_and_is_as_before_afterwards(job):
    script = "[ -t 0 ] && [ -t 1 ] && echo terminal; read -r word; echo got $word; stty size"
    words = [*job.words(), "--", "bash", "-c", script]
    process, main = pty.fork()
    if not process:
        os.chdir(job.folder)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "91", "LINES": "17"}
        os.execve(words[0], words, env)
    before = termios.tcgetattr(main)
    assert until(main, b"terminal")
    os.write(main, b"hello\n")
    seen = until(main, b"17 91")
    assert b"got hello" in seen
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0, seen
    assert termios.tcgetattr(main) == before


def until(main: int, words: bytes) -> bytes:
    seen = b""
    while words not in seen:
        assert select.select([main], [], [], 120)[0], seen
        try:
            seen += os.read(main, 4096)
        except OSError as error:  # the other end is closed
            raise AssertionError(seen) from error
    return seen
