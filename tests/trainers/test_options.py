"""Flags that cannot work together are refused before anything starts, and the message says what to change."""

import subprocess
import sys

import pytest
from agree import same_sums

import options
import rules
import train
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
def test_a_contradiction_ends_with_2_and_says_what_to_change(
    flags: str, says: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse(flags.split())
    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert all(part in line for part in says), line


def test_a_run_that_could_time_nothing_is_refused_at_once() -> None:
    flags = ("--steps", "1000000", "--warmup-s", "40", "--budget-s", "25")
    done = subprocess.run([sys.executable, launch.TRAIN, *flags], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "leaves nothing of --budget-s 25 to time" in done.stderr
    assert "connect" not in done.stdout  # before the ranks meet


@pytest.mark.parametrize(
    "flags",
    ["--steps 1", "--steps 3", "--steps 80 --until 2", "--steps 5 --warmup 4", "--warmup-s 12 --budget-s 32"],
)
def test_a_short_run_without_a_warmup_of_its_own_is_not_refused(flags: str) -> None:
    assert options.parse(flags.split()).warmup in {options.WARMUP, 4}


@pytest.mark.parametrize("every", [1, 3, 70, 100, 200, 499, 500, 501, 3000])
def test_any_interval_of_checkpoints_has_a_default_for_whole_weights(every: int) -> None:
    whole = options.parse(["--checkpoint-every", str(every)]).full_every
    assert whole % every == 0
    assert whole >= options.FULL_EVERY > whole - every


@pytest.mark.parametrize("steps", [2, 3, 5, 19, 20, 100, 100_000])
def test_the_rate_reaches_its_peak_and_ends_one_step_above_its_floor(steps: int) -> None:
    parsed = options.parse(["--steps", str(steps)])
    assert max(train.learning_rate(step, 2.0, parsed) for step in range(min(steps, 20))) == 2.0
    last, behind = (train.learning_rate(step, 2.0, parsed) for step in (steps - 1, steps))
    same_sums(behind, 2.0 * train.LR_FLOOR, terms=1)
    assert behind <= last
