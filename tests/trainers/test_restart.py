"""Ranks that are killed, by a signal or under torchrun's restart loop: no bit of the job changes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from agree import same_bits

import waits
from tools import launch

FLAGS = ("--steps", "120", "--data", "text", "--lr-warmup", "20")
FLAGS += ("--checkpoint-every", "7", "--full-every", "35")
KILLS = 3
SEED = 20


@pytest.mark.slow
def test_kills_at_random_steps_change_no_bit(tmp_path):
    alone = [sys.executable, str(launch.TRAIN), *FLAGS]
    whole = json.loads(
        subprocess.run(alone, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    )
    command, rng, starts = [*alone, "--checkpoint", str(tmp_path)], random.Random(SEED), []
    for number in range(KILLS):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until(tmp_path, 30 * (number + 1) + rng.randrange(14))
        time.sleep(rng.random() * 0.05)  # into a step, or into the writing of a checkpoint
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=waits.LIMIT_S)
        starts.append(_newest(tmp_path))
    assert starts == sorted(starts)
    assert starts[-1] < 120, "the job was over before its last kill"
    last = subprocess.run(command, capture_output=True, text=True, check=True)
    resumed = json.loads(last.stdout.splitlines()[-1])
    assert resumed["first_step"] == starts[-1] > 0
    same_bits(resumed["losses"], whole["losses"][starts[-1] :])
    assert resumed["digest"] == whole["digest"]


def _newest(folder: Path) -> int:
    # Digits alone: a checkpoint is complete a moment before it has its name, and a kill may fall in between.
    return max((int(path.parent.name[5:]) for path in folder.glob("step_*[0-9]/COMPLETE")), default=0)


def _until(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 300
    while _newest(folder) + 7 <= step:
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in time"
        time.sleep(0.005)


STEPS, EVERY, FULL = 60, 5, 20
JOB = f"--steps {STEPS} --data text --global-batch 8 --device cpu --no-backend-check".split()
TIERS = ("--checkpoint-every", f"{EVERY}", "--full-every", f"{FULL}")
RESTARTS = 2


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks_from_the_newest_of_two_tiers(tmp_path, record):
    whole = record(2, *JOB)
    *run, train = launch.torchrun(2)
    command = [*run, "--max-restarts", "5", train, *JOB, *TIERS, "--checkpoint", str(tmp_path / "shared")]
    drawn, out, killed = random.Random(4), tmp_path / "out", []
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        for after in (EVERY, FULL + EVERY)[:RESTARTS]:
            deadline = time.monotonic() + 300
            while _newest(tmp_path / "shared") < after:
                assert process.poll() is None, out.read_text()
                assert time.monotonic() < deadline, out.read_text()
                time.sleep(0.02)
            time.sleep(drawn.random() * 0.05)  # into a step, or into the writing of a checkpoint
            ranks = launch._children(process.pid)
            assert ranks
            killed.append(_newest(tmp_path / "shared"))
            os.kill(drawn.choice(ranks), signal.SIGKILL)
        assert process.wait(400) == 0, out.read_text()
    finally:
        launch.end(process)
    record = json.loads(out.read_text().splitlines()[-1])
    assert len(killed) == RESTARTS
    assert record["first_step"] >= killed[-1] > 0
    assert record["first_step"] < STEPS, "the job was over before its last kill"
    same_bits(record["losses"], whole["losses"][record["first_step"] :])
    assert record["digest"] == whole["digest"]
    full = {path.parent.name for path in (tmp_path / "shared").glob("*/weights.safetensors")}
    kept = {f"step_{step:08}" for step in range(FULL, STEPS + 1, FULL)}
    assert full == kept, "the full tier is never pruned"
    small = {path.name for path in (tmp_path / "shared").iterdir() if path.suffix != ".partial"} - full
    newest_two = {f"step_{STEPS - 2 * EVERY:08}", f"step_{STEPS - EVERY:08}"}
    assert small == newest_two, "of the small tier the newest two"
