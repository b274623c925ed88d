"""Flags, lengths and places among ranks that cannot be meant: refused in one line before anything starts."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from agree import same_sums

import errors
import options
import presets
import rows
import rules
import train
import world
from errors import RefusedError
from harness.processes import WorkloadError
from layouts import prepare
from models import mpt
from tools import launch

COUNTS = [f"--{name.replace('_', '-')}" for name in (*rules.COUNTS, "seq_len", "micro_batch")]
LABELS = ("--pack concat", "--model moe", "--pp 2")
HALF = ("--validate-every 2", "--validation-data text", "--validate-every 0 --validation-data text")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--warmup-s 40 --budget-s 25", ("--warmup-s 40", "--budget-s 25", "a budget above 40 s")),
        ("--warmup-s 25 --budget-s 25", ("--warmup-s 25", "a shorter warm-up")),
        ("--steps 5 --warmup 5", ("--warmup 5", "--steps 5", "more than 5 steps")),
        ("--steps 9 --until 4 --warmup 7", ("--warmup 7", "--until 4", "a warm-up below 4")),
        ("--full-every 150", ("--full-every", "multiple of --checkpoint-every 100")),
        *((f"{flag} {value}", (flag, "expected 1 or more")) for flag in COUNTS for value in ("0", "-3")),
        ("--lr -1", ("--lr -1", "expected 0 or more")),
        ("--lr nan", ("--lr nan", "expected 0 or more")),
        ("--steps 5 --lr-warmup 5", ("--lr-warmup 5 never reaches the peak in --steps 5",)),
        ("--steps 3 --until 4", ("--until 4", "--steps 3")),
        ("--reduce-each --parallel zero1", ("--reduce-each works with --parallel fsdp2, without --pp only",)),
        ("--reduce-each --pp 2", ("--reduce-each works with --parallel fsdp2, without --pp only",)),
        ("--tp 2 --parallel full_shard", ("--tp and --pp work with --parallel fsdp2 and zero1 only",)),
        ("--tp 2 --parallel zero1 --precision fp8", ("FP8 in the fused layer alone", "take fsdp2")),
        ("--pack masked --model mistral", ("--pack masked works with llama", "take --pack concat")),
        *((f"--labels x --data x {flag}", ("--labels does not work with",)) for flag in LABELS),
        *((flags, ("--validat",)) for flags in HALF),
        ("--no-flat-gradients", ("--no-flat-gradients needs --parallel zero1",)),
        ("--no-flat-gradients --parallel zero1 --precision bf16", ("--reduce bf16",)),
        ("--lean --model llama", ("--lean works with --model moe and flux only",)),
        ("--implementation fused", ("--implementation fused works with llama, mistral, --parallel zero1",)),
        ("--model flux --tp 2", ("--tp does not work with --model flux",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_contradiction_ends_with_2_and_says_what_to_change(flags, says, capsys):
    with pytest.raises(SystemExit) as ended:
        options.parse(flags.split())
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert all(part in line for part in says), line


@pytest.mark.parametrize(
    "flags",
    ["--steps 1", "--steps 3", "--steps 80 --until 2", "--steps 5 --warmup 4", "--warmup-s 12 --budget-s 32"],
)
def test_a_short_run_without_a_warmup_of_its_own_is_not_refused(flags):
    assert options.parse(flags.split()).warmup in {options.WARMUP, 4}


@pytest.mark.parametrize("every", [1, 3, 70, 100, 200, 499, 500, 501, 3000])
def test_any_interval_of_checkpoints_has_a_default_for_whole_weights(every):
    whole = options.parse(["--checkpoint-every", str(every)]).full_every
    assert whole % every == 0
    assert whole >= options.FULL_EVERY > whole - every


@pytest.mark.parametrize("steps", [2, 3, 5, 19, 20, 100, 100_000])
def test_the_rate_reaches_its_peak_and_ends_one_step_above_its_floor(steps):
    parsed = options.parse(["--steps", str(steps)])
    assert max(train.learning_rate(step, 2.0, parsed) for step in range(min(steps, 20))) == 2.0
    last, behind = (train.learning_rate(step, 2.0, parsed) for step in (steps - 1, steps))
    same_sums(behind, 2.0 * train.LR_FLOOR, terms=1)
    assert behind <= last


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
def test_torchrun_reports_the_line_and_the_exit_code(name):
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
def test_a_refused_rank_that_is_stopped_keeps_its_code(moment, tmp_path):
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
def test_one_process_says_one_line(name, record):
    flags, line = REFUSED[name]
    with pytest.raises(WorkloadError, match="exited with 2") as refused:
        record(1, "--device", "cpu", *flags)
    (own,) = [said for said in str(refused.value).splitlines() if said.startswith("train.py: ")]
    assert own.startswith(line)
    assert "Traceback" not in str(refused.value)


@pytest.mark.parametrize(("rank", "printed"), [("0", True), ("3", False)])
def test_the_error_file_of_a_rank_has_its_line_and_code(rank, printed, tmp_path, monkeypatch, capsys):
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr(errors.signal, "signal", lambda *_: None)  # this process is pytest's
    assert errors.said("train.py: no", 5) == 5
    message = json.loads(path.read_text())["message"]
    assert (message["message"], message["errorCode"]) == ("train.py: no", 5)
    assert capsys.readouterr().err == ("train.py: no\n" if printed else "")


LEARNED = [
    name for name, of in presets.PRESETS.items() if isinstance(of.config, mpt.Config) and not of.config.alibi
]


@pytest.mark.parametrize(("family", "size"), LEARNED, ids=["-".join(name) for name in LEARNED])
def test_a_longer_sequence_is_refused_with_the_length_of_the_table(family, size):
    most = presets.find(family, size).config.positions
    presets.check_length(family, size, None)
    presets.check_length(family, size, most)
    said = (
        rf"--seq-len {2 * most} is longer than the table of learned positions of --model {family} --size "
        rf"{size}: expected at most {most}; lower --seq-len, or take"
    )
    with pytest.raises(RefusedError, match=said):
        presets.check_length(family, size, 2 * most)


def test_it_is_refused_before_the_ranks_connect(monkeypatch):
    monkeypatch.setattr(train, "joined_ranks", lambda _: pytest.fail("a rank connected"))
    with pytest.raises(RefusedError, match="--seq-len 65 is longer"):
        train.main(["--model", "gpt", "--size", "tiny", "--seq-len", "65", "--device", "cpu"])


def test_positions_that_no_table_holds_have_no_limit():
    for family, size in (("mpt", "7b-released"), ("llama", "8b"), ("moe", "zaya1-like"), ("flux", "dev-512")):
        presets.check_length(family, size, 10**6)


@pytest.mark.parametrize("name", sorted(rows.load_rows()))
def test_every_published_job_has_a_length_that_its_model_holds(name):
    jobs = [row for row in rows.document(name).rows if row.flags]
    for row in jobs:
        given = options.parse(list(row.flags))
        presets.check_length(given.model, given.size, row.seq_len or given.seq_len)


def test_a_model_cannot_read_past_its_table():
    config = presets.find("gpt", "tiny").config
    model = prepare.skeleton(presets.MODELS["gpt"], config).to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.zeros(1, config.positions + 1, dtype=torch.long)
    assert model(tokens[:, 1:], tokens[:, 1:]).isfinite()
    with pytest.raises(IndexError):
        model(tokens, tokens)


def test_a_missing_numpy_is_named_before_ranks_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numpy" else name)
    with pytest.raises(RefusedError, match="pip install numpy"), world.joined_ranks(options.parse([])):
        pass
    assert not dist.is_initialized()
