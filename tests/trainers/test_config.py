"""--config: the file beside a checkpoint is the run again, and a wrong file is refused with its key."""

import dataclasses
from pathlib import Path

import pytest

import config
import options
from conftest import Record

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
def test_the_file_of_a_run_is_the_run_again(line: str, tmp_path: Path) -> None:
    parsed, path = options.parse(shell(line)), tmp_path / config.NAME
    path.write_text(config.text(parsed, SETTLED), encoding="utf-8")
    again = options.parse(["--config", str(path)])
    settled = {"lr": 0.25, "micro_batch": "2", "seq_len": 32, "global_batch": 8, "config": path}
    assert again == dataclasses.replace(parsed, **settled)


def test_every_option_is_in_the_file_or_left_open() -> None:
    parsed = options.parse(["--steps", "9"])
    text = config.text(parsed, {})
    absent = {name for name in vars(parsed) if f"{name.replace('_', '-')} = " not in text}
    assert absent == {name for name, value in vars(parsed).items() if value is None}


def test_the_command_line_wins_in_any_order_of_words(tmp_path: Path) -> None:
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
def test_a_wrong_file_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        options.parse(["--config", str(path)])
    assert WRONG[text] in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        options.parse(["--config", str(tmp_path / "absent.toml")])
    assert "No such file" in capsys.readouterr().err


def test_a_checkpoint_has_the_options_that_continue_it(tmp_path: Path, record: Record) -> None:
    first = record(2, "--steps", "4", "--until", "2", "--lr", "0.01", "--checkpoint", str(tmp_path))
    kept = tmp_path / "step_00000002" / config.NAME
    got = record(2, "--config", str(kept), "--until", "4")
    assert (got["first_step"], got["plan"]) == (2, first["plan"])
    whole = record(2, "--steps", "4", "--lr", "0.01")
    assert got["digest"] == whole["digest"]
