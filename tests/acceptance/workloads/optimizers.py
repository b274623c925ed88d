"""Fused, foreach and plain AdamW against the formula in float64.

In: nothing. Out: the report of `cases.run`.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from workloads import cases, device, operands
from workloads.gates import Reading, elementwise, exact

LEARNING_RATE, BETAS, EPS, DECAY = 1e-2, (0.9, 0.95), 1e-8, 0.1
STEPS = 100
# Gradient scales by parameter: zero, below the square root of epsilon, ordinary, large.
SCALES = (0.0, 1e-7, 1.0, 1e4)
FORMS = {"fused": {"fused": True}, "foreach": {"foreach": True}, "plain": {"foreach": False}}


def check() -> dict[str, Any]:
    """A hundred steps of each form."""
    return cases.run(_cases())


def _cases() -> Iterator[cases.Case]:
    for name, options in FORMS.items():
        yield f"{name}, {STEPS} steps", functools.partial(_replay, options)
        yield f"{name}, an empty parameter", functools.partial(_empty, options)


def _replay(options: dict[str, bool]) -> Iterable[Reading]:
    start = [operands.normal(1031, dtype=torch.float32, seed=i) for i in range(len(SCALES))]
    parameters = [tensor.clone().requires_grad_() for tensor in start]
    optimizer = _adamw(parameters, options)
    wide = [tensor.double() for tensor in start]
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in wide]
    for step in range(1, STEPS + 1):
        for index, parameter in enumerate(parameters):
            noise = operands.normal(1031, dtype=torch.float32, seed=100 * step + index)
            parameter.grad = noise * SCALES[index]
            wide[index], moments[index] = reference(
                wide[index], *moments[index], parameter.grad.double(), step
            )
        optimizer.step()
    for index, parameter in enumerate(parameters):
        # Each step rounds the parameter once, and moves it by about the learning rate times a few roundings.
        drift = STEPS * 2.0**-23 * (wide[index].abs() + 32 * LEARNING_RATE)
        yield elementwise(parameter.detach(), wide[index], drift, name=f"gradients x {SCALES[index]:g}")
        kinds = {str(v.dtype) for v in optimizer.state[parameter].values() if v.numel() > 1}
        yield Reading("moments not in float32", float(kinds != {"torch.float32"}), 0.0, str(kinds))


def reference(
    p: torch.Tensor, m: torch.Tensor, v: torch.Tensor, g: torch.Tensor, step: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One step of decoupled weight decay (arXiv 1711.05101, algorithm 2)."""
    m = BETAS[0] * m + (1 - BETAS[0]) * g
    v = BETAS[1] * v + (1 - BETAS[1]) * g * g
    denominator = (v / (1 - BETAS[1] ** step)).sqrt() + EPS
    p = p * (1 - LEARNING_RATE * DECAY) - LEARNING_RATE * m / (1 - BETAS[0] ** step) / denominator
    return p, (m, v)


def _adamw(parameters: list[torch.Tensor], options: dict[str, bool]) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=DECAY, **options
    )


def _empty(options: dict[str, bool]) -> Iterable[Reading]:
    nothing = torch.empty(0, device=device()).requires_grad_()
    other = torch.ones(5, device=device()).requires_grad_()
    nothing.grad, other.grad = torch.empty_like(nothing), torch.zeros_like(other)
    _adamw([nothing, other], options).step()
    yield exact(other.detach(), torch.ones(5, device=device()) * (1 - LEARNING_RATE * DECAY))
