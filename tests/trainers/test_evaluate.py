"""lm-eval over our checkpoints: its numbers are the model's, and who was trained knows more."""

import json
import os
import tempfile
from pathlib import Path

import pytest
import torch
from agree import same_sums

import data
import presets
import whole
from errors import RefusedError
from tools import evaluate, scoring

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": tempfile.mkdtemp(prefix="hf-")}  # read when it is imported
pytest.importorskip("lm_eval")
TASK = """
task: known_text
dataset_path: json
dataset_kwargs:
  data_files: {{test: {file}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: label
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""
QUESTIONS = 40


@pytest.mark.parametrize("family", ["llama", "mistral", "moe", "mpt", "gpt"])
def test_scores_are_the_log_probabilities_of_each_pair_alone(family):
    model = presets.MODELS[family].Model(presets.find(family, "tiny").config).eval()
    torch.manual_seed(2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    random = torch.Generator().manual_seed(4)
    pairs = [
        tuple(torch.randint(256, (size,), generator=random).tolist() for size in sizes)
        for sizes in ((3, 2), (20, 7), (60, 9), (1, 1))
    ]
    scorer = scoring.Scorer(model, 64, 3, torch.device("cpu"))
    for (context, continuation), (score, greedy) in zip(pairs, scorer.scores(pairs), strict=True):
        row = torch.tensor([(context + continuation)[-65:]])
        with torch.no_grad():
            logs = model.logits(row[:, :-1])[0].log_softmax(-1)[-len(continuation) :]
        want = torch.tensor(continuation)
        same_sums(score, float(logs[range(len(continuation)), want].sum()))
        assert greedy == bool((logs.argmax(-1) == want).all())


def test_a_continuation_that_does_not_fit_and_an_empty_context_are_refused():
    model = presets.MODELS["llama"].Model(presets.find("llama", "tiny").config)
    scorer = scoring.Scorer(model, 8, 2, torch.device("cpu"))
    for pair in (([1], [2] * 9), ([], [1])):
        with pytest.raises(RefusedError, match="at most 8, which the model reads at once"):
            scorer.scores([pair])


def test_a_model_that_gives_no_numbers_is_an_error():
    model = presets.MODELS["llama"].Model(presets.find("llama", "tiny").config)
    torch.nn.init.constant_(model.head.norm.weight, float("nan"))
    with pytest.raises(ValueError, match="nan"):
        scoring.Scorer(model, 8, 2, torch.device("cpu")).scores([([1], [2])])


def questions(path: Path) -> None:
    """How pieces of the text that it learned from go on, and the same bytes in another order."""
    text, random = data.TEXT.read_text(), torch.Generator().manual_seed(9)
    lines = []
    for number in range(QUESTIONS):
        place = int(torch.randint(len(text) - 48, (), generator=random))
        begin, end = text[place : place + 32], text[place + 32 : place + 48]
        mixed = "".join(end[i] for i in torch.randperm(16, generator=random).tolist())
        label = number % 2
        lines.append({"begin": begin, "endings": [mixed, end] if label else [end, mixed], "label": label})
    path.write_text("\n".join(map(json.dumps, lines)))


@pytest.mark.slow
def test_a_trained_checkpoint_answers_what_a_fresh_one_cannot(tmp_path, capsys, record):
    questions(tmp_path / "questions.jsonl")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "known.yaml").write_text(TASK.format(file=tmp_path / "questions.jsonl"))
    job = ("--model", "llama", "--size", "tiny", "--data", "text", "--steps", "100")
    record(1, *job, "--full-every", "100", "--checkpoint", str(tmp_path))
    folder = tmp_path / "step_00000100"
    arguments = ["--model", "llama", "--size", "tiny", "--tasks", "known_text", "--device", "cpu"]
    arguments += ["--task-folder", str(tmp_path / "tasks"), "--checkpoint", str(folder)]

    def answers() -> dict:
        evaluate.main(arguments)
        out, err = capsys.readouterr()
        assert "| Model | known_text | average |" in err
        return json.loads(out.splitlines()[-1])["tasks"]["known_text"]

    trained = answers()
    torch.manual_seed(1)
    fresh = presets.MODELS["llama"].Model(presets.find("llama", "tiny").config)
    write(folder / "weights.safetensors", fresh.state_dict())
    assert (trained["questions"], trained["metric"]) == (QUESTIONS, "acc_norm")
    assert trained["value"] > 0.8
    assert answers()["value"] < 0.75


def write(path: Path, weights: dict[str, torch.Tensor]) -> None:
    whole.write(path, {name: value.shape for name, value in weights.items()}, weights.items())


def test_weights_of_another_model_are_refused(tmp_path):
    (tmp_path / "COMPLETE").write_text('{"step": 1}')
    write(tmp_path / "weights.safetensors", {"a": torch.zeros(1)})
    with pytest.raises(RefusedError, match="not the weights of llama tiny"):
        evaluate.load(tmp_path, "llama", "tiny", torch.device("cpu"), torch.float32)
    (tmp_path / "COMPLETE").unlink()
    with pytest.raises(RefusedError, match="no complete checkpoint"):
        evaluate.load(tmp_path, "llama", "tiny", torch.device("cpu"), torch.float32)
