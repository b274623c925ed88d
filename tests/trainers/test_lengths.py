"""A sequence is never longer than the table of learned positions: it is refused before anything starts."""

import pytest
import torch

import options
import presets
import rows
import train
from errors import RefusedError
from layouts import prepare
from models import mpt

LEARNED = [
    name for name, of in presets.PRESETS.items() if isinstance(of.config, mpt.Config) and not of.config.alibi
]


@pytest.mark.parametrize(("family", "size"), LEARNED, ids=["-".join(name) for name in LEARNED])
def test_a_longer_sequence_is_refused_with_the_length_of_the_table(family: str, size: str) -> None:
    most = presets.find(family, size).config.positions
    presets.check_length(family, size, None)
    presets.check_length(family, size, most)
    said = (
        rf"--seq-len {2 * most} is longer than the table of learned positions of --model {family} --size "
        rf"{size}: expected at most {most}; lower --seq-len, or take"
    )
    with pytest.raises(RefusedError, match=said):
        presets.check_length(family, size, 2 * most)


def test_it_is_refused_before_the_ranks_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train, "joined_ranks", lambda _: pytest.fail("a rank connected"))
    with pytest.raises(RefusedError, match="--seq-len 65 is longer"):
        train.main(["--model", "gpt", "--size", "tiny", "--seq-len", "65", "--device", "cpu"])


def test_positions_that_no_table_holds_have_no_limit() -> None:
    for family, size in (("mpt", "7b-released"), ("llama", "8b"), ("moe", "zaya1-like"), ("flux", "dev-512")):
        presets.check_length(family, size, 10**6)


@pytest.mark.parametrize("name", sorted(rows.load_rows()))
def test_every_published_job_has_a_length_that_its_model_holds(name: str) -> None:
    jobs = [row for row in rows.document(name).rows if row.flags]
    for row in jobs:
        given = options.parse(list(row.flags))
        presets.check_length(given.model, given.size, row.seq_len or given.seq_len)


def test_a_model_cannot_read_past_its_table() -> None:
    config = presets.find("gpt", "tiny").config
    model = prepare.skeleton(presets.MODELS["gpt"], config).to_empty(device="cpu")
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    tokens = torch.zeros(1, config.positions + 1, dtype=torch.long)
    assert model(tokens[:, 1:], tokens[:, 1:]).isfinite()
    with pytest.raises(IndexError):
        model(tokens, tokens)
