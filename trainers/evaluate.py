"""In-context evaluation: lm-eval's tasks on a checkpoint of any text family.

In: a checkpoint with whole weights, a tokenizer, and tasks by name or from local files. Out: one JSON
document on stdout, and on stderr a row of the table in which LLM Foundry's article on MI250 compares models.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import checkpoint
import presets
from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

SEED = 1234
# LLM Foundry ranks choices by their mean loss, so a longer one is not at a disadvantage: acc_norm is nearest.
METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")


class Bytes:
    """The tokenizer of the text that is shipped: a token is a byte, a line ends a text."""

    end = 10
    size = 256

    def encode(self, text: str) -> list[int]:
        """UTF-8."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """UTF-8; what is none is replaced."""
        return bytes(tokens).decode(errors="replace")


class FromFolder:
    """A tokenizer that transformers reads from a folder; nothing is downloaded."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.inner = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        if self.inner.eos_token_id is None:
            raise RefusedError(f"{folder}: the tokenizer names no end of text (eos_token)")
        self.end, self.size = self.inner.eos_token_id, len(self.inner)

    def encode(self, text: str) -> list[int]:
        """Without special tokens: a continuation has to be the rest of the whole."""
        return self.inner.encode(text, add_special_tokens=False)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens."""
        return self.inner.decode(tokens)


@dataclass(frozen=True)
class Scorer:
    """A model with how it is run: `length` positions and `batch` rows at most."""

    model: nn.Module
    length: int
    batch: int
    device: torch.device

    def scores(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): its log-probability (nat), and whether it is the greedy one.

        Contexts lose their beginning where the pair is too long.

        Raises:
            RefusedError: A continuation alone is longer than the model reads, or a context is empty.
            ValueError: The model gives a number that is not finite.
        """
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(pairs)), key=lambda i: -sum(map(len, pairs[i])))
        for begin in range(0, len(order), self.batch):
            places = order[begin : begin + self.batch]
            found |= zip(places, self._batch([pairs[i] for i in places]), strict=True)
        return [found[i] for i in range(len(pairs))]

    def _batch(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        for context, continuation in pairs:
            if not context or len(continuation) > self.length:
                size = f"{len(context)} + {len(continuation)}"
                raise RefusedError(f"a text of {size} tokens; the model reads {self.length} at once")
        rows = [(context + continuation)[-(self.length + 1) :] for context, continuation in pairs]
        # What stands right of a row cannot change it: attention is causal.
        logits = self.logits([row[:-1] for row in rows])
        out = []
        for row, (_, continuation), scores in zip(rows, pairs, logits, strict=True):
            last = len(row) - 1
            part = scores[last - len(continuation) : last].float().log_softmax(-1)
            want = torch.tensor(continuation, device=part.device)
            total = float(part.gather(-1, want[:, None]).sum())
            if not math.isfinite(total):
                raise ValueError(f"the model gives a log-probability of {total}")
            out.append((total, bool((part.argmax(-1) == want).all())))
        return out

    @torch.inference_mode()
    def logits(self, rows: Sequence[list[int]]) -> Tensor:
        """[rows, longest row, vocabulary] of rows padded on the right."""
        width = max(map(len, rows))
        tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=self.device)
        return self.model.logits(tokens)

    def continued(self, tokens: list[int], count: int, ends: int) -> list[int]:
        """The greedy continuation, up to `count` tokens or the end of text."""
        new: list[int] = []
        while len(new) < count and (not new or new[-1] != ends):
            new.append(int(self.logits([(tokens + new)[-self.length :]])[0, -1].argmax()))
        return new


def language_model(scorer: Scorer, tokenizer: Bytes | FromFolder) -> Any:
    """The scorer as lm-eval wants one."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Ours(TemplateLM):
        eot_token_id = tokenizer.end

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002  # lm-eval's signature
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list, **_: Any) -> list[tuple[float, bool]]:
            return scorer.scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list, disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
            totals = []
            for request in requests:
                tokens = tokenizer.encode(request.args[0])
                windows = get_rolling_token_windows(tokens, tokenizer.end, scorer.length, 1)
                pairs = [make_disjoint_window(window) for window in windows]
                totals.append(sum(score for score, _ in scorer.scores(pairs)))
            return totals

        def generate_until(self, requests: list, disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
            texts = []
            for request in requests:
                context, wishes = request.args
                count = wishes.get("max_gen_toks", 64)
                text = tokenizer.decode(scorer.continued(tokenizer.encode(context), count, tokenizer.end))
                for stop in wishes.get("until", ()):
                    text = text.split(stop)[0]
                texts.append(text)
            return texts

    return Ours()


def load(folder: Path, family: str, size: str, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model of a complete checkpoint that holds whole weights.

    Raises:
        RefusedError: It is not complete, holds no whole weights, or is of another model.
    """
    path = folder / "weights.pt"
    if not (folder / checkpoint.MARKER).exists() or not path.exists():
        raise RefusedError(f"{folder}: no complete checkpoint with whole weights (--full-every writes such)")
    with torch.device("meta"):
        model = presets.MODELS[family].Model(presets.find(family, size).config)
    try:
        model.load_state_dict(torch.load(path, mmap=True, weights_only=True), assign=True)
    except RuntimeError as error:
        raise RefusedError(f"{path}: not the weights of {family} {size}: {error}") from error
    return model.to(device, dtype).eval()


def evaluate(
    model: Any, tasks: list[str], folder: Path | None, shots: int, limit: int | None
) -> dict[str, Any]:
    """lm-eval's results by task: metrics, standard errors, and how many questions.

    Raises:
        RefusedError: A task is not known, or has no questions.
    """
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=folder, include_defaults=folder is None)
    absent = sorted(set(tasks) - set(manager.all_tasks))
    if absent:
        known = ", ".join(sorted(manager.all_tasks)[:8])
        raise RefusedError(f"no such task: {', '.join(absent)}; known are {known}, …")
    found = simple_evaluate(
        model=model,
        tasks=tasks,
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        random_seed=SEED,
        numpy_random_seed=SEED,
        torch_random_seed=SEED,
        fewshot_random_seed=SEED,
        bootstrap_iters=0,
    )
    return {task: _row(found["results"][task], found["n-samples"][task]["effective"]) for task in tasks}


def _row(result: dict[str, Any], questions: int) -> dict[str, Any]:
    """One task: every metric under its own name, and the one that the table shows."""
    metrics = {key.removesuffix(",none"): value for key, value in result.items() if key.endswith(",none")}
    shown = next((name for name in METRICS if name in metrics), None)
    if questions == 0 or shown is None:
        raise RefusedError(f"a task without questions or without a metric of {', '.join(METRICS)}")
    return {"questions": questions, "metric": shown, "value": metrics[shown], "metrics": metrics}


def table(name: str, tasks: dict[str, Any]) -> str:
    """A Markdown row with its head: the model, its tasks, their average."""
    values = [row["value"] for row in tasks.values()]
    cells = [*(f"{value:.3f}" for value in values), f"{sum(values) / len(values):.3f}"]
    heads = ["Model", *tasks, "average"]
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), [name, *cells]))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--checkpoint", type=Path, required=True, help="a folder step_00000042")
    add("--model", choices=sorted(set(presets.MODELS) - {"flux"}), required=True)
    add("--size", required=True, help="of the preset that was trained")
    add("--tokenizer", default="bytes", help="`bytes`, or a folder that transformers reads")
    add(
        "--tasks",
        required=True,
        help="names, by comma: arc_challenge,arc_easy,boolq,hellaswag,piqa,winogrande",
    )
    add("--task-folder", type=Path, help="where their YAML files are [lm-eval's own]")
    add("--shots", type=int, default=0, help="examples before each question")
    add("--limit", type=int, help="questions of each task [all]")
    add("--batch", type=int, default=16, help="rows at once")
    add("--length", type=int, help="positions at most [what it was trained with]")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=("float32", "bfloat16"), default="float32")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Evaluate and print."""
    options = parse(arguments)
    device = torch.device(options.device)
    model = load(options.checkpoint, options.model, options.size, device, getattr(torch, options.dtype))
    tokenizer = Bytes() if options.tokenizer == "bytes" else FromFolder(Path(options.tokenizer))
    if tokenizer.size > model.config.vocab:
        raise RefusedError(f"a tokenizer of {tokenizer.size} tokens for a vocabulary of {model.config.vocab}")
    length = options.length or presets.find(options.model, options.size).seq_len
    ours = language_model(Scorer(model, length, options.batch, device), tokenizer)
    tasks = evaluate(ours, options.tasks.split(","), options.task_folder, options.shots, options.limit)
    name = f"{options.model} {options.size}, step {checkpoint.facts(options.checkpoint)['step']}"
    print(table(name, tasks), file=sys.stderr)
    print(json.dumps({"model": name, "shots": options.shots, "limit": options.limit, "tasks": tasks}))


if __name__ == "__main__":
    try:
        main()
    except ImportError as error:
        sys.exit(f"error: {error}; pip install lm-eval (and transformers for a tokenizer's folder)")
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
