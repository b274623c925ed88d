"""What a child computes for a witness question. In: numbers that the controller drew. Out: all values.

`harness.witness` draws the numbers when it asks, computes the same in float64 by itself, and compares.
"""

from typing import Any

import torch
import torch.nn.functional as F

from workloads import device

Numbers = list[Any]


def gemm(a: Numbers, b: Numbers, weights: Numbers) -> dict[str, Numbers]:
    """A product, and the gradients of its weighted sum."""
    x, y = _leaf(a), _leaf(b)
    product = x @ y
    (product * _tensor(weights)).sum().backward()
    return _told(product=product, a=x.grad, b=y.grad)


def attention(q: Numbers, k: Numbers, v: Numbers, weights: Numbers, *, causal: bool) -> dict[str, Numbers]:
    """Scaled dot product attention, and the gradients of its weighted sum."""
    leaves = [_leaf(part) for part in (q, k, v)]
    out = F.scaled_dot_product_attention(*(leaf[None] for leaf in leaves), is_causal=causal)[0]
    (out * _tensor(weights)).sum().backward()
    return _told(out=out, q=leaves[0].grad, k=leaves[1].grad, v=leaves[2].grad)


def layer_norm(
    x: Numbers, scale: Numbers, shift: Numbers, weights: Numbers, eps: float
) -> dict[str, Numbers]:
    """LayerNorm, and the gradients of its weighted sum."""
    leaf, gain, bias = _leaf(x), _leaf(scale), _leaf(shift)
    out = F.layer_norm(leaf, (len(scale),), gain, bias, eps)
    (out * _tensor(weights)).sum().backward()
    return _told(out=out, x=leaf.grad, scale=gain.grad, shift=bias.grad)


def cross_entropy(logits: Numbers, targets: list[int]) -> dict[str, Numbers]:
    """The mean cross entropy, and its gradient."""
    leaf = _leaf(logits)
    loss = F.cross_entropy(leaf, torch.tensor(targets, device=device()))
    loss.backward()
    return _told(loss=loss[None], logits=leaf.grad)


def convolution(
    x: Numbers, kernel: Numbers, weights: Numbers, stride: int, padding: int
) -> dict[str, Numbers]:
    """A convolution of one image, and the gradients of its weighted sum."""
    leaf, filters = _leaf(x), _leaf(kernel)
    out = F.conv2d(leaf[None], filters, stride=stride, padding=padding)[0]
    (out * _tensor(weights)).sum().backward()
    return _told(out=out, x=leaf.grad, kernel=filters.grad)


def embedding(table: Numbers, rows: list[int], weights: Numbers) -> dict[str, Numbers]:
    """Rows of a table, and the table's gradient of their weighted sum."""
    leaf = _leaf(table)
    out = F.embedding(torch.tensor(rows, device=device()), leaf)
    (out * _tensor(weights)).sum().backward()
    return _told(out=out, table=leaf.grad)


def optimizer(
    start: Numbers, gradients: Numbers, *, lr: float, betas: tuple[float, float], eps: float, decay: float
) -> dict[str, Numbers]:
    """The parameter after steps of AdamW with given gradients, and how far they moved it."""
    leaf = _leaf(start)
    adamw = torch.optim.AdamW([leaf], lr=lr, betas=tuple(betas), eps=eps, weight_decay=decay)
    for gradient in gradients:
        leaf.grad = _tensor(gradient)
        adamw.step()
    parameter = leaf.detach()
    return _told(parameter=parameter, moved=parameter.double() - _tensor(start).double())


def training(
    x: Numbers, targets: list[int], first: Numbers, second: Numbers, *, lr: float, steps: int
) -> dict[str, Numbers]:
    """The losses and the weights of a small network after steps of gradient descent."""
    inputs, wanted = _tensor(x), torch.tensor(targets, device=device())
    weights = [_leaf(first), _leaf(second)]
    sgd, losses = torch.optim.SGD(weights, lr=lr), []
    for _ in range(steps):
        sgd.zero_grad()
        loss = F.cross_entropy(torch.tanh(inputs @ weights[0]) @ weights[1], wanted)
        loss.backward()
        sgd.step()
        losses.append(loss.detach())
    return _told(losses=torch.stack(losses), first=weights[0].detach(), second=weights[1].detach())


def _tensor(numbers: Numbers) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=device())


def _leaf(numbers: Numbers) -> torch.Tensor:
    return _tensor(numbers).requires_grad_()


def _told(**tensors: torch.Tensor | None) -> dict[str, Numbers]:
    return {name: tensor.detach().tolist() for name, tensor in tensors.items() if tensor is not None}
