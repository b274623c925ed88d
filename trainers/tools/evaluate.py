"""In-context evaluation: lm-eval's tasks on a checkpoint of any text family.

In: a checkpoint with whole weights, a tokenizer, and tasks by name or from local files. Out: one JSON
document on stdout, and on stderr a row of the table in which LLM Foundry's article on MI250 compares models.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run by path: find the rooms of trainers/, and Hugging Face's `evaluate`
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from errors import require_torch

    require_torch(__file__)

import torch

import checkpoint
import initial
import presets
import whole
from errors import RefusedError
from tools.scoring import Bytes, FromFolder, Scorer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

SEED = 1234
SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
# LLM Foundry ranks choices by mean loss, so that long ones have no disadvantage: acc_norm is the nearest
# metric.
METRICS = ("acc_norm", "acc", "exact_match", "word_perplexity")


def language_model(scorer: Scorer, tokenizer: Bytes | FromFolder) -> Any:
    """The scorer as a model of lm-eval."""
    from lm_eval.api.model import TemplateLM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    class Ours(TemplateLM):
        eot_token_id = tokenizer.end

        # lm-eval's signatures: our tokenizers take no special tokens, and show no progress bar.
        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:  # noqa: ARG002
            return tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: list[Any], **_: Any) -> list[tuple[float, bool]]:
            return scorer.scores([(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:  # noqa: ARG002
            totals = []
            for request in requests:
                tokens = tokenizer.encode(request.args[0])
                windows = get_rolling_token_windows(tokens, tokenizer.end, scorer.length, 1)
                pairs = [make_disjoint_window(window) for window in windows]
                totals.append(sum(score for score, _ in scorer.scores(pairs)))
            return totals

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:  # noqa: ARG002
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
    path = folder / checkpoint.WEIGHTS
    if not (folder / checkpoint.MARKER).exists() or not path.exists():
        raise RefusedError(
            f"{folder}: no complete checkpoint with whole weights; name one written by --full-every"
        )
    with torch.device("meta"):
        config = initial.kept(folder, family) or presets.find(family, size).config
        model = presets.MODELS[family].Model(config)
    try:
        model.load_state_dict(initial.untied(config, whole.read(path)), assign=True)
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
        raise RefusedError(
            f"unknown task {', '.join(absent)}; known: {known}, …; check --tasks and --task-folder"
        )
    found = simple_evaluate(
        model=model,
        tasks=tasks,
        num_fewshot=shots,
        limit=limit,
        task_manager=manager,
        bootstrap_iters=0,
        **dict.fromkeys(SEEDS, SEED),
    )
    return {task: _row(found["results"][task], found["n-samples"][task]["effective"]) for task in tasks}


def _row(result: dict[str, Any], questions: int) -> dict[str, Any]:
    """One task: every metric under its own name, and the one that the table shows."""
    metrics = {key.removesuffix(",none"): value for key, value in result.items() if key.endswith(",none")}
    shown = next((name for name in METRICS if name in metrics), None)
    if questions == 0 or shown is None:
        raise RefusedError(
            f"expected questions and one of the metrics {', '.join(METRICS)}, got {questions} questions and "
            f"{', '.join(metrics) or 'no metric'}; choose another task"
        )
    return {"questions": questions, "metric": shown, "value": metrics[shown], "metrics": metrics}


def table(name: str, tasks: dict[str, Any]) -> str:
    """A Markdown table of one row: the model, its tasks, their average."""
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
    add("--size", required=True, help="size of the preset that was trained")
    add("--tokenizer", default="bytes", help="`bytes`, or a folder that transformers reads")
    add(
        "--tasks",
        required=True,
        help="names of tasks, separated by commas: arc_challenge,arc_easy,boolq,hellaswag,piqa,winogrande",
    )
    add("--task-folder", type=Path, help="folder with the tasks' YAML files [lm-eval's own]")
    add("--shots", type=int, default=0, help="examples before each question")
    add("--limit", type=int, help="questions of each task [all]")
    add("--batch", type=int, default=16, help="rows at once")
    add("--length", type=int, help="most positions of one call [the length that the model was trained with]")
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
        raise RefusedError(
            f"the tokenizer has {tokenizer.size} tokens, the model {model.config.vocab}; "
            "name the tokenizer of its training data"
        )
    presets.check_length(options.model, options.size, options.length)
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
