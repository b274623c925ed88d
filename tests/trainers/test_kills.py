"""A job killed without warning at random steps, again and again, ends with the bits of the one left alone."""

import json
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
def test_kills_at_random_steps_change_no_bit(tmp_path: Path) -> None:
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
