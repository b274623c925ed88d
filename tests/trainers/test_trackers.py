"""TensorBoard and Weights & Biases get the numbers of each line of progress, as their readers see them."""

import importlib.util
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import options
import trackers
from errors import RefusedError

TEXT = Path(trackers.__file__).with_name("text.txt")
JOB = ("--steps", "6", "--global-batch", "4", "--micro-batch", "2", "--log-every", "2", "--no-backend-check")
EACH = ("--validate-every", "3", "--validation-data", str(TEXT), "--validation-batches", "1")
Figures = dict[tuple[str, int], float]


def said(lines: Iterable[dict[str, Any]]) -> Figures:
    """What the lines say; the last of a step counts."""
    return {
        (name, line["step"]): value
        for line in lines
        for name, value in line.items()
        if name != "step" and value is not None
    }


def in_float32(figures: Figures) -> Figures:
    """TensorBoard's scalars have 32 bits."""
    return {key: torch.tensor(value, dtype=torch.float32).item() for key, value in figures.items()}


def test_tensorboard_reads_what_the_lines_say_and_a_resumed_job_takes_over(tmp_path, record):
    pytest.importorskip("tensorboard", reason="the image has no tensorboard; .ci/peers.txt pins it")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lines, board = tmp_path / "lines.jsonl", tmp_path / "board"
    kept = ("--checkpoint", str(tmp_path / "kept"), "--checkpoint-every", "3", "--full-every", "3")
    job = (*JOB, *EACH, *kept, "--progress", str(lines), "--tensorboard", str(board))
    record(2, *job)
    (tmp_path / "kept/step_00000006").rename(tmp_path / "lost")
    record(2, *job)
    reader = EventAccumulator(str(board), size_guidance={"scalars": 0})
    reader.Reload()
    events = [(tag, event) for tag in reader.Tags()["scalars"] for event in reader.Scalars(tag)]
    got = {(tag, event.step): event.value for tag, event in events}
    want = in_float32(said(map(json.loads, lines.read_text().splitlines())))
    assert {("loss", 2), ("loss", 6), ("lr", 4), ("validation_loss", 3)} <= want.keys()
    assert got == want
    assert len(events) == len(got), "steps 4 and 6 of the first run are gone"


def records(path: Path) -> list[Any]:
    """The records of an offline run: a header of 7 bytes, then LevelDB's log in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    whole, at, parts, found = path.read_bytes(), 7, b"", []
    while at + 7 <= len(whole):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", whole[at : at + 7])
        parts, at = parts + whole[at + 7 : at + 7 + size], at + 7 + size
        if kind in {1, 4}:  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


KEEP = """
import json, sys
sys.path.insert(0, sys.argv[1])
import options, trackers

given = trackers.Trackers(options.parse(["--wandb", "a-project", "--lr", "0.5", "--data", "text"]), 0)
for line in json.loads(sys.argv[2]):
    given.write(line)
given.close()
"""


def test_wandb_keeps_what_the_lines_say(tmp_path):
    pytest.importorskip("wandb", reason="the image has no wandb; .ci/peers.txt pins it")
    facts = [
        {"step": 2, "loss": 1.5, "lr": 0.25, "memory_gib": None},
        {"step": 2, "validation_loss": 1.25},
        {"step": 4, "loss": 1.125, "lr": 0.5},
        {"step": 4, "validation_loss": None},
    ]
    # In a process of its own: the package keeps what an earlier test's libraries made of its settings.
    settings = {"MODE": "offline", "DIR": str(tmp_path), "SILENT": "true", "_SERVICE_WAIT": "300"}
    environment = os.environ | {f"WANDB_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-c", KEEP, str(TEXT.parent), json.dumps(facts)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.rglob("*.wandb")
    kept = records(path)
    got: Figures = {}
    for record in kept:
        items = {
            ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item
        }
        got |= {(name, items["_step"]): value for name, value in items.items() if not name.startswith("_")}
    assert got == said(facts)
    (run,) = [record.run for record in kept if record.HasField("run")][:1]
    assert run.project == "a-project"
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["lr"], config["data"], "until" in config) == (0.5, "text", False)


@pytest.mark.parametrize("name", trackers.NEEDED)
def test_a_package_that_is_missing_is_said_before_any_step(name, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(
        RefusedError, match=f"--{name} needs {name}, which is not installed; pip install {name}"
    ):
        trackers.require(options.parse([f"--{name}", "there"]))
    trackers.require(options.parse([]))
