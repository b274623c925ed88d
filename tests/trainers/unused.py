"""train.py with two weights more in every block of Llama: one that forward does not use, and one that is
frozen. In: train.py's flags. Out: its record, with how far the frozen ones moved.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))

import torch
from torch import nn

import record
import train
from layouts import prepare
from models import llama

make = record.make


class Block(llama.Block):
    """Llama's block and a frozen product, with a weight beside it that is in no product."""

    def __init__(self, config: llama.Config) -> None:
        super().__init__(config)
        self.frozen = nn.Linear(config.width, config.width, bias=False)
        self.frozen.requires_grad_(requires_grad=False)
        self.spare = nn.Linear(config.width, 8, bias=False)

    def forward(self, x: torch.Tensor, *context: Any) -> torch.Tensor:
        """As Llama's, from a part more."""
        return super().forward(x + self.frozen(x), *context)


def with_moved(run: Any) -> dict[str, Any]:
    """The record, and the largest change of a frozen or unused weight."""
    layers, moved = run.job.model.config.layers, 0.0
    for name, value in run.job.weights():
        if ".frozen." in name or ".spare." in name:
            device = run.world.device
            first = prepare.initial_value(name, value.shape, layers, run.options, device)
            moved = max(moved, float((value - first.cpu()).abs().max()))
    return {**make(run), "moved": moved}


llama.Block = Block
record.make = with_moved
sys.exit(train.main(sys.argv[1:]))
