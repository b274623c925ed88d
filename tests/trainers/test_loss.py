"""The loss that never holds all logits: its gradients are autograd's, also inside what is compiled."""

import pytest
import torch
from agree import same_sums
from torch import nn

from models import layers
from models.layers import LossHead


def gradients(head: LossHead, chunks: int, *, compiled: bool) -> tuple[torch.Tensor, ...]:
    head.chunks = chunks
    values = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 32, generator=values, requires_grad=True)
    labels = torch.randint(64, (2, 16), generator=values)
    loss = (torch.compile(head, backend="aot_eager") if compiled else head)(x, labels)
    return torch.autograd.grad(loss, (x, *head.parameters()))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("chunks", [4, layers.BY_ROWS], ids=["four", "by rows"])
def test_chunks_have_the_gradient_of_the_whole(
    compiled: bool, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "ROWS", 12)
    # Compiled by torch 2.11, a sum in place had a gradient of zero, and a whole 8B model learnt nothing.
    torch.manual_seed(0)
    head = LossHead(nn.RMSNorm(32), nn.Linear(32, 64, bias=False), chunks=1)
    whole = gradients(head, 1, compiled=False)
    same_sums(gradients(head, chunks, compiled=compiled), whole, terms=32 + 64 + 32)
    assert all(gradient.norm() > 0 for gradient in whole)
