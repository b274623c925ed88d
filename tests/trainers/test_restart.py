"""torchrun's restart loop: killed ranks come back from a shared folder, and no bit of the job changes."""

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
from agree import same_bits

from conftest import Record
from tools import launch

STEPS, EVERY, FULL = 60, 5, 20
JOB = f"--steps {STEPS} --data text --global-batch 8 --device cpu --no-backend-check".split()
TIERS = ("--checkpoint-every", f"{EVERY}", "--full-every", f"{FULL}")
KILLS = 2


def newest(folder: Path) -> int:
    return max((int(path.parent.name[5:]) for path in folder.glob("step_*[0-9]/COMPLETE")), default=0)


@pytest.mark.slow
def test_torchrun_restarts_killed_ranks_from_the_newest_of_two_tiers(tmp_path: Path, record: Record) -> None:
    whole = record(2, *JOB)
    *run, train = launch.torchrun(2)
    command = [*run, "--max-restarts", "5", train, *JOB, *TIERS, "--checkpoint", str(tmp_path / "shared")]
    drawn, out, killed = random.Random(4), tmp_path / "out", []
    with out.open("wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        for after in (EVERY, FULL + EVERY)[:KILLS]:
            deadline = time.monotonic() + 300
            while newest(tmp_path / "shared") < after:
                assert process.poll() is None, out.read_text()
                assert time.monotonic() < deadline, out.read_text()
                time.sleep(0.02)
            time.sleep(drawn.random() * 0.05)  # into a step, or into the writing of a checkpoint
            ranks = launch._children(process.pid)
            assert ranks
            killed.append(newest(tmp_path / "shared"))
            os.kill(drawn.choice(ranks), signal.SIGKILL)
        assert process.wait(400) == 0, out.read_text()
    finally:
        launch.end(process)
    record = json.loads(out.read_text().splitlines()[-1])
    assert len(killed) == KILLS
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
