"""A head whose vocabulary the ranks share: its loss and gradients, printed beside those of one rank.

torchrun --nproc-per-node 2 heads.py VOCABULARY CHUNKS IGNORED
"""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "trainers"))
from torch.distributed.device_mesh import init_device_mesh

from fused import ops
from layouts import prepare
from models.layers import LossHead

WIDTH, ROWS = 24, 36


def head(vocab: int, chunks: int) -> LossHead:
    """A head with drawn weights, the same on each rank."""
    random_ = torch.Generator().manual_seed(7)
    made = LossHead(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, vocab, bias=False), chunks)
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=random_))
    return made


def figures(of: LossHead, labels: torch.Tensor) -> dict[str, Any]:
    """The loss with and without gradients, logits, and whole gradients of x and each weight."""
    x = torch.randn(2, ROWS // 2, WIDTH, generator=torch.Generator().manual_seed(3)).requires_grad_()
    with torch.no_grad():
        alone, logits = of(x, labels), of.logits(x)
    loss = of(x, labels)
    (loss * 3).backward()
    whole = {name: weight.grad for name, weight in of.named_parameters()}
    whole = {name: g.full_tensor() if hasattr(g, "full_tensor") else g for name, g in whole.items()}
    gradients = {"x": x.grad, **whole}
    return {
        "loss": loss.item(),
        "alone": alone.item(),
        "logits": logits.tolist(),
        "gradients": {name: gradient.tolist() for name, gradient in gradients.items()},
    }


def main(vocab: int, chunks: int, ignored: float) -> None:
    """Print what each rank has, and what one rank has with plain autograd."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    random_ = torch.Generator().manual_seed(5)
    labels = torch.randint(vocab, (2, ROWS // 2), generator=random_)
    labels[torch.rand(labels.shape, generator=random_) < ignored] = ops.IGNORED
    shared = head(vocab, chunks)
    model: Any = SimpleNamespace(head=shared)
    prepare.split_head(model, mesh)
    got: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(got, figures(shared, labels) | {"words": shared.out.weight.to_local().shape[0]})
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"got": got, "want": figures(head(vocab, 1), labels)}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
