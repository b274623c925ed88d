r"""A shortened convergence run: train on real text, and see the in-context scores rise against the start.

    python benchmarks/training/convergence.py --folder runs/mpt-125m --ranks 1 --steps 600 -- \
        --model mpt --size 125m --precision bf16 --global-batch 64 --seq-len 1024

The text is this machine's corpus (corpus.py). The questions are from documents that training never sees:
which of four continuations follows this context? Three are from other documents, so guessing scores 0.25.
Choices are ranked by mean log-probability per token, as LLM Foundry ranks them; a margin is the right one's
above the mean of the others. Out: one JSON line with the scores after the first step and at the end. Exit
code 0: the margin of the same questions rose by more than three standard errors. 1: it did not, or the job
failed. 2: refused.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/ as train.py does
    sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "trainers"))
    from errors import require_torch

    require_torch(__file__)

import torch

import corpus
import options as command_line
import presets
import streams
from errors import RefusedError
from tools import evaluate, launch
from tools.scoring import Scorer

CHOICES = 4
ERRORS = 3.0  # standard errors by which the scores must rise
SEED = 7


@dataclass(frozen=True, kw_only=True)
class Question:
    """A context and its possible continuations; the first one is right."""

    context: list[int]
    choices: list[list[int]]


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parser().parse_args(arguments)
    try:
        result = run(options)
    except (RefusedError, launch.RunError) as error:
        print(f"convergence.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, RefusedError) else 1
    print(json.dumps(result))
    return 0 if result["rose"] else 1


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Train in two segments, then score both ends."""
    job = command_line.parse(list(options.flags))
    records = train(options)
    length = job.seq_len or presets.find(job.model, job.size).seq_len
    asked = questions(
        corpus.made() / "heldout.jsonl", streams.tokenizer(job.tokenizer), length, options.questions
    )
    start, end = (scores(options, job, step, length, asked) for step in (1, options.steps))
    gains = [after - before for before, after in zip(start.pop("margins"), end.pop("margins"), strict=True)]
    error = statistics.stdev(gains) / math.sqrt(len(gains))
    return {
        "model": f"{job.model} {job.size}",
        "steps": options.steps,
        "tokens": options.steps * records[-1]["plan"]["global_batch"] * records[-1]["plan"]["seq_len"],
        "data_digest": records[-1]["extra"]["data_digest"],
        "loss": [records[0]["losses"][0], records[-1]["losses"][-1]],
        "questions": len(asked),
        "start": start,
        "end": end,
        "margin_gain": statistics.mean(gains),
        "standard_error": error,
        "rose": statistics.mean(gains) > ERRORS * error,
    }


def train(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of the first step and of the rest; whole weights are kept of both."""
    system = launch.System("here", launch.torchrun(options.ranks))
    shared = [
        "--data",
        "corpus",
        "--steps",
        str(options.steps),
        "--checkpoint",
        str(options.folder),
        "--no-digest",
    ]
    found = []
    for until in (1, options.steps):
        every = ["--until", str(until), "--checkpoint-every", str(until), "--full-every", str(until)]
        found.append(launch.run(system, [*options.flags, *shared, *every], timeout_s=options.timeout_s))
        if found[-1]["problems"]:
            raise RefusedError(f"the job has problems: {found[-1]['problems']}")
    if found[1]["first_step"] != 1:
        raise RefusedError(f"{options.folder} holds another run; name an empty folder")
    return found


def questions(path: Path, by: streams.Tokenizer, length: int, count: int) -> list[Question]:
    """Questions of so many documents: the right continuation, and three from other documents."""
    texts = [json.loads(line)["text"] for line in path.open()]
    tokens = [ids.tolist() for ids in by.encode(texts) if len(ids) > length]
    answer = max(1, min(32, length // 3))
    drawn = random.Random(SEED)
    pieces = []
    for ids in tokens[: max(count, CHOICES)]:
        begin = drawn.randrange(len(ids) - length)
        cut = begin + length - answer
        pieces.append((ids[begin:cut], ids[cut : cut + answer]))
    if len(pieces) < CHOICES:
        raise RefusedError(
            f"{path}: {len(pieces)} documents of more than {length} tokens, expected {CHOICES}"
        )
    found = []
    for number, (context, right) in enumerate(pieces):
        others = drawn.sample([piece[1] for i, piece in enumerate(pieces) if i != number], CHOICES - 1)
        found.append(Question(context=context, choices=[right, *others]))
    return found


def scores(
    options: argparse.Namespace, job: command_line.Options, step: int, length: int, asked: list[Question]
) -> dict[str, Any]:
    """Share of right answers, mean log-probability of a token of the right one, each margin (nat)."""
    device = torch.device("cuda" if torch.cuda.is_available() and job.device != "cpu" else "cpu")
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = evaluate.load(options.folder / f"step_{step:08}", job.model, job.size, device, kind)
    scorer = Scorer(model, length, 16, device)
    pairs = [(question.context, choice) for question in asked for choice in question.choices]
    means = [total / len(choice) for (total, _), (_, choice) in zip(scorer.scores(pairs), pairs, strict=True)]
    ranked = [means[i : i + CHOICES] for i in range(0, len(means), CHOICES)]
    right = sum(row[0] > max(row[1:]) for row in ranked)
    return {
        "accuracy": right / len(asked),
        "right_nats": statistics.mean(row[0] for row in ranked),
        "margins": [row[0] - statistics.mean(row[1:]) for row in ranked],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="folder of the checkpoints; it must be empty")
    add("--ranks", type=int, default=1, help="ranks on this host")
    add("--steps", type=int, default=600, help="steps of the whole run")
    add(
        "--questions",
        type=int,
        default=400,
        help="number of questions; each is from another document of the held-out text",
    )
    add("--timeout-s", type=float, default=3600, help="longest time of one segment")
    add("flags", nargs="*", help="flags of train.py, after --")
    return parser


if __name__ == "__main__":
    launch.stop_runs_on_sigterm()
    sys.exit(main(sys.argv[1:]))
