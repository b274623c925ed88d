"""Documents that share a sample do not see each other with --pack masked, and do without."""

import pytest
import torch
from agree import different, same_sums

import options
import presets
from layouts import prepare


@pytest.mark.parametrize(("family", "size"), [("llama", "tiny"), ("mpt", "tiny-released")])
def test_a_document_in_a_packed_sample_has_the_logits_that_it_has_alone(family: str, size: str) -> None:
    parsed = options.parse(["--model", family, "--size", size])
    preset = presets.find(family, size)
    model = prepare.skeleton(presets.MODELS[family], preset.config, loss_chunks=1)
    prepare.give_weights(model, model, "", parsed, torch.device("cpu"))
    first, second = torch.randint(256, (2, 1, 20), generator=torch.Generator().manual_seed(1))
    packed = torch.cat((first, second), 1)
    documents = torch.tensor([[0] * 20 + [1] * 20])
    with torch.inference_mode():
        alone = model.head.logits(model.hidden(second))
        masked = model.head.logits(model.hidden(packed, documents))[:, 20:]
        crossing = model.head.logits(model.hidden(packed))[:, 20:]
        loss = model(packed[:, :-1], packed[:, 1:], documents[:, :-1])
    same_sums(masked, alone)
    assert different(crossing, alone)
    assert torch.isfinite(loss)
