"""What is refused is one line and an exit code, with torchrun too, whose report has both."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import errors
from conftest import Record
from harness.processes import WorkloadError
from tools import launch

REFUSED = {
    "a flag": (["--steps", "0"], "train.py: error: --steps 0: expected 1 or more"),
    "no such flag": (["--stepz", "3"], "train.py: error: unrecognized arguments: --stepz 3"),
    "a batch": (
        ["--global-batch", "7", "--micro-batch", "2"],
        "train.py: --global-batch 7 is not a multiple",
    ),
    "a size": (["--size", "9b"], "train.py: no preset llama/9b"),
    "ranks": (["--tp", "3"], "train.py: 1 ranks cannot be divided by pp 1"),
    "data": (["--data", "/nowhere"], "train.py: --data /nowhere: does not exist"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a flag", "data"])
def test_torchrun_reports_the_line_and_the_exit_code(name: str) -> None:
    flags, line = REFUSED[name]
    command = [*launch.torchrun(2), "--device", "cpu", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, "torchrun has no exit code of its own"
    _, _, report = done.stderr.rpartition("Root Cause")
    assert "exitcode  : 2" in report
    assert f"traceback : {line}" in report
    assert sum(said.startswith("train.py: ") for said in done.stderr.splitlines()) <= 1
    assert "usage:" not in done.stderr
    assert done.stdout.count("{") == 0


@pytest.mark.parametrize("moment", ["while the file is written", "before it ends", "as Python ends"])
def test_a_refused_rank_that_is_stopped_keeps_its_code(moment: str, tmp_path: Path) -> None:
    """torchrun stops the other ranks as soon as one ends: its report had "exitcode : -15" for the cause."""
    program = f"""
import os, pathlib, signal, sys, time
sys.path.insert(0, {str(launch.TRAIN.parent)!r})
import errors
write = pathlib.Path.write_text
def stopped(path, text):
    write(path, text[:9])
    if {moment.startswith("while")}:
        os.kill(os.getpid(), signal.SIGTERM)
    write(path, text)
pathlib.Path.write_text = stopped
code = errors.said("train.py: no", 5)
if {moment.startswith("before")}:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)
class Late:
    def __del__(self, kill=os.kill, me=os.getpid()):
        kill(me, 15)
if {moment.startswith("as")}:
    late = Late()
sys.exit(code)
"""
    path = tmp_path / "error.json"
    variables = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(path), "RANK": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=variables, check=False)
    assert done.returncode == 5
    assert json.loads(path.read_text())["message"]["errorCode"] == 5


@pytest.mark.parametrize("name", REFUSED)
def test_one_process_says_one_line(name: str, record: Record) -> None:
    flags, line = REFUSED[name]
    with pytest.raises(WorkloadError, match="exited with 2") as refused:
        record(1, "--device", "cpu", *flags)
    (own,) = [said for said in str(refused.value).splitlines() if said.startswith("train.py: ")]
    assert own.startswith(line)
    assert "Traceback" not in str(refused.value)


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("3", False)])
def test_the_error_file_of_a_rank_has_its_line_and_code(
    rank: str,
    printed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(errors.signal, "signal", lambda *_: None)  # this process is pytest's
    assert errors.said("train.py: no", 5) == 5
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("train.py: no", 5)
    assert capsys.readouterr().err == ("train.py: no\n" if printed else "")
