"""A checkpoint is complete as soon as it is written, a job that is done is done when its command is repeated,
and a job continues only its own checkpoints.
"""

import json
from pathlib import Path
from typing import Any

import one_rank
import pytest
import torch
from agree import same_bits

import checkpoint
import options
import waits
from conftest import Record
from harness.processes import WorkloadError

JOB = ("--steps", "4", "--device", "cpu", "--no-backend-check", "--checkpoint-every", "2")


def test_an_asynchronous_checkpoint_is_complete_without_another_one_after_it(tmp_path: Path) -> None:
    with one_rank.joined(options.parse(["--device", "cpu"])):
        store = checkpoint.Checkpoints(tmp_path, asynchronous=True, kept_as=None, beside={"a": "b"}, of={})
        store.save(7, {"weight": torch.ones(3)})
        # Nothing else is called: training goes on.
        waits.until(lambda: checkpoint.complete(tmp_path), "a complete checkpoint")
        (folder,) = checkpoint.complete(tmp_path)
        assert folder.name == "step_00000007"
        assert (folder / "a").read_text() == "b"
        store.finish()
        assert checkpoint.complete(tmp_path) == [folder]


def test_an_asynchronous_checkpoint_that_cannot_be_completed_is_an_error(tmp_path: Path) -> None:
    with one_rank.joined(options.parse(["--device", "cpu"])):
        store = checkpoint.Checkpoints(tmp_path, asynchronous=True, kept_as=None, beside={}, of={})
        (tmp_path / "step_00000007").touch()  # in its way
        store.save(7, {"weight": torch.ones(3)})
        with pytest.raises(NotADirectoryError):
            store.finish()
        assert not checkpoint.complete(tmp_path)


@pytest.mark.parametrize("until", [(), ("--until", "2")], ids=["whole", "segment"])
def test_a_job_that_is_done_does_nothing_when_its_command_is_repeated(
    until: tuple[str, ...], tmp_path: Path, record: Record
) -> None:
    kept = (*JOB, *until, "--checkpoint", str(tmp_path))
    first, again = record(1, *kept), record(1, *kept)  # both exit with 0: the fixture raises otherwise
    assert again["problems"] == again["losses"] == []
    assert again["first_step"] == again["last_step"] == first["last_step"]
    assert again["digest"] == first["digest"]


CHANGES: dict[str, tuple[str, ...]] = {
    "--seed": ("--seed", "2"),
    "--global-batch": ("--global-batch", "8"),
    "--lr": ("--lr", "0"),
    "--lr-warmup": ("--lr-warmup", "1"),
    "--steps": ("--steps", "6"),
    "--seq-len": ("--seq-len", "32"),
    "--data": ("--data", "text"),
}


@pytest.fixture(scope="module")
def segment(record: Record, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("segment")
    record(1, *JOB, "--until", "2", "--checkpoint", str(folder))
    return folder


@pytest.mark.parametrize("flag", CHANGES)
def test_a_checkpoint_of_a_job_with_other_samples_or_another_schedule_is_refused(
    flag: str, segment: Path, record: Record
) -> None:
    kept = (*JOB, *CHANGES[flag], "--until", "2", "--checkpoint", str(segment))
    with pytest.raises(WorkloadError, match=rf"is of a job with {flag} .*--changed") as refused:
        record(1, *kept)
    assert "Traceback" not in str(refused.value)
    assert record(1, *kept, "--changed")["first_step"] == 2


def test_a_rate_of_zero_is_zero_and_not_the_presets(record: Record) -> None:
    still: list[dict[str, Any]] = [record(1, *JOB, "--lr", "0", "--until", until) for until in ("1", "3")]
    assert [one["plan"]["lr"] for one in still] == [0.0, 0.0]
    same_bits([still[0]["digest"] == still[1]["digest"]], [True])


def test_a_checkpoint_says_which_job_wrote_it(segment: Path) -> None:
    said = json.loads((segment / "step_00000002" / checkpoint.MARKER).read_text())
    assert set(CHANGES) <= set(said["of"])
