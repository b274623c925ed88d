"""A checkpoint is complete as soon as it is written; whole weights go to a file and back one at a time."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import one_rank
import pytest
import torch
from agree import same_bits
from held import Held

import checkpoint
import config
import options
import waits
import whole
from conftest import Record
from errors import RefusedError
from harness.processes import WorkloadError

JOB = ("--steps", "4", "--device", "cpu", "--no-backend-check", "--checkpoint-every", "2")


def test_an_asynchronous_checkpoint_is_complete_without_another_one_after_it(tmp_path):
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


def test_an_asynchronous_checkpoint_that_cannot_be_completed_is_an_error(tmp_path):
    with one_rank.joined(options.parse(["--device", "cpu"])):
        store = checkpoint.Checkpoints(tmp_path, asynchronous=True, kept_as=None, beside={}, of={})
        (tmp_path / "step_00000007").touch()  # in its way
        store.save(7, {"weight": torch.ones(3)})
        with pytest.raises(NotADirectoryError):
            store.finish()
        assert not checkpoint.complete(tmp_path)


@pytest.mark.parametrize("until", [(), ("--until", "2")], ids=["whole", "segment"])
def test_a_job_that_is_done_does_nothing_when_its_command_is_repeated(until, tmp_path, record):
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
def segment(record: Record, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("segment")
    record(1, *JOB, "--until", "2", "--checkpoint", str(folder))
    return folder


@pytest.mark.parametrize("flag", CHANGES)
def test_a_checkpoint_of_a_job_with_other_samples_or_another_schedule_is_refused(flag, segment, record):
    kept = (*JOB, *CHANGES[flag], "--until", "2", "--checkpoint", str(segment))
    with pytest.raises(WorkloadError, match=rf"is of a job with {flag} .*--changed") as refused:
        record(1, *kept)
    assert "Traceback" not in str(refused.value)
    assert record(1, *kept, "--changed")["first_step"] == 2


def test_a_rate_of_zero_is_zero_and_not_the_presets(record):
    still: list[dict[str, Any]] = [record(1, *JOB, "--lr", "0", "--until", until) for until in ("1", "3")]
    assert [one["plan"]["lr"] for one in still] == [0.0, 0.0]
    same_bits([still[0]["digest"] == still[1]["digest"]], [True])


def test_a_checkpoint_says_which_job_wrote_it(segment):
    said = json.loads((segment / "step_00000002" / checkpoint.MARKER).read_text())
    assert set(CHANGES) <= set(said["of"])


WEIGHTS = {
    "b": torch.randn(3, 5),
    "empty": torch.zeros(0, 4),
    "a": torch.randn(7),
    "scalar": torch.tensor(2.0),
}
SHAPES = {name: value.shape for name, value in WEIGHTS.items()}


@pytest.fixture
def path(tmp_path) -> Path:
    whole.write(tmp_path / "w.safetensors", SHAPES, WEIGHTS.items())
    return tmp_path / "w.safetensors"


def test_weights_come_back_as_they_were(path):
    same_bits(whole.read(path), WEIGHTS)


def test_the_library_reads_ours_and_we_read_the_librarys(path, tmp_path):
    library = pytest.importorskip("safetensors.torch")
    same_bits(library.load_file(path), WEIGHTS)
    mixed: dict[str, Any] = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        **WEIGHTS,
    }
    library.save_file(mixed, tmp_path / "mixed.safetensors")
    same_bits(whole.read(tmp_path / "mixed.safetensors"), mixed)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1, -4])
def test_a_file_that_is_cut_off_is_refused(kept, path):
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RefusedError, match="no whole file of safetensors"):
        whole.read(path)


def test_one_weight_is_held_at_a_time(tmp_path):
    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            yield f"{number:02}", torch.ones(1000)

    with Held() as held:
        whole.write(tmp_path / "w.safetensors", {f"{number:02}": (1000,) for number in range(20)}, made())
    assert held.peak <= 2 * 4000


def test_weights_in_another_order_than_their_shapes_are_an_error(tmp_path):
    with pytest.raises(AssertionError, match="is not b"):
        whole.write(tmp_path / "w.safetensors", SHAPES, reversed(WEIGHTS.items()))


LAYOUTS = [
    (2, ()),
    (2, ("--parallel", "full_shard")),
    (2, ("--parallel", "zero1")),
    (2, ("--pp", "2")),
    (2, ("--tp", "2")),
]


def test_every_layout_has_the_same_weights_in_the_same_order_and_file(tmp_path, record):
    job = ("--steps", "1", "--global-batch", "8", "--micro-batch", "4", "--device", "cpu", "--lr", "0")
    want = record(1, *job, "--checkpoint", str(tmp_path / "want"))
    first = whole.read(tmp_path / "want/step_00000001/weights.safetensors")
    assert list(first) == sorted(first)
    for number, (ranks, flags) in enumerate(LAYOUTS):
        got = record(ranks, *job, *flags, "--checkpoint", str(tmp_path / str(number)))
        assert got["digest"] == want["digest"], flags
        same_bits(whole.read(tmp_path / f"{number}/step_00000001/weights.safetensors"), first)


SETTLED = {"lr": 0.25, "micro_batch": 2, "seq_len": 32, "global_batch": 8, "accumulate": 4}
RUNS = (
    "",
    "--steps 2",
    "--steps 400 --until 30 --warmup 4 --lr-warmup 7 --clip 0.3 --weight-decay 1e-5",
    "--model moe --lean --no-reshard --no-digest --compile --deterministic --not-finite skip",
    '--data "C:\\odd [\\"path\\"] é" --checkpoint kept --checkpoint-every 7 --asynchronous --no-resume',
    "--price-per-hour 2 --phase-limit-s 1e9 --seed -3 --log-every 0 --micro-batch 2",
)


def shell(line: str) -> list[str]:
    import shlex

    return shlex.split(line)


@pytest.mark.parametrize("line", RUNS)
def test_the_file_of_a_run_is_the_run_again(line, tmp_path):
    parsed, path = options.parse(shell(line)), tmp_path / config.NAME
    path.write_text(config.text(parsed, SETTLED), encoding="utf-8")
    again = options.parse(["--config", str(path)])
    settled = {"lr": 0.25, "micro_batch": "2", "seq_len": 32, "global_batch": 8, "config": path}
    assert again == dataclasses.replace(parsed, **settled)


def test_every_option_is_in_the_file_or_left_open():
    parsed = options.parse(["--steps", "9"])
    text = config.text(parsed, {})
    absent = {name for name in vars(parsed) if f"{name.replace('_', '-')} = " not in text}
    assert absent == {name for name, value in vars(parsed).items() if value is None}


def test_the_command_line_wins_in_any_order_of_words(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text('steps = 7\nlr = 0.5\nreshard = false\nmicro_batch = 3\nmodel = "mpt"\n')
    for words in (["--config", str(path), "--steps", "8", "--reshard"], ["--steps", "8", "--reshard"]):
        got = options.parse([*words, "--config", str(path)])
        assert (got.steps, got.lr, got.reshard, got.micro_batch, got.model) == (8, 0.5, True, "3", "mpt")


WRONG = {
    "stepz = 3": "unknown key stepz; did you mean steps?",
    "global_batches = 3": "unknown key global_batches; did you mean global-batch?",
    "qqq = 3": "unknown key qqq; expected a flag without its dashes",
    "config = 'b.toml'": "unknown key config",
    "help = true": "unknown key help",
    "steps = [3]": r"steps = [3]: expected a number or a string",
    "steps = true": "steps = True: expected a number or a string",
    "reshard = 1": "reshard = 1: expected true or false",
    "reshard = 'no'": "reshard = 'no': expected true or false",
    "[how]\ntp = 2": "unknown key how",
    "steps = 'many'": "argument --steps: invalid int value: 'many'",
    "steps": "give a file of TOML",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_refused(text, tmp_path, capsys):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        options.parse(["--config", str(path)])
    assert WRONG[text] in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        options.parse(["--config", str(tmp_path / "absent.toml")])
    assert "No such file" in capsys.readouterr().err


def test_a_checkpoint_has_the_options_that_continue_it(tmp_path, record):
    first = record(2, "--steps", "4", "--until", "2", "--lr", "0.01", "--checkpoint", str(tmp_path))
    kept = tmp_path / "step_00000002" / config.NAME
    got = record(2, "--config", str(kept), "--until", "4")
    assert (got["first_step"], got["plan"]) == (2, first["plan"])
    whole = record(2, "--steps", "4", "--lr", "0.01")
    assert got["digest"] == whole["digest"]
