"""A job that has ended holds no tensor: the next one in the same process may need the whole device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TRAINERS = Path(__file__).resolve().parents[2] / "trainers"
JOB = "--size tiny --data text --steps 2 --global-batch 8 --no-digest --no-backend-check --no-preflight"
LAYOUTS = (
    "--parallel zero1 --precision bf16 --implementation fused",
    "--parallel zero1",
    "--parallel fsdp2 --no-compile",
)
PROGRAM = """
import gc, json, sys
import torch
import options, train
from phases import Phases
from world import joined_ranks

jobs = [options.parse(flags.split()) for flags in json.loads(sys.argv[1])]
phases, left = Phases(300), []
with joined_ranks(jobs[0]) as world:
    for job in jobs:
        assert train.job(job, world, phases, None)["problems"] == []
        gc.collect()
        mine = (torch.Tensor, torch.nn.Parameter)
        left.append(sum(type(o) in mine and o.numel() > 999 for o in gc.get_objects()))
print(json.dumps(left))
"""


@pytest.mark.slow
def test_layout_gives_its_memory_back() -> None:
    flags = json.dumps([f"{JOB} {layout}" for layout in LAYOUTS])
    command = [sys.executable, "-c", PROGRAM, flags]
    run = subprocess.run(command, cwd=TRAINERS, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    left = json.loads(run.stdout.strip().splitlines()[-1])
    assert left == [0] * len(LAYOUTS), f"tensors that stayed after each job: {left}"
