"""From a preset to weights on the device, the same on every layout. In: Preset, Options. Out: a model.

Weights are drawn per parameter from (seed, name), so they do not depend on how many ranks there are, which
layers a rank holds, or in which order it builds them.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from options import Options

STD = 0.02


def skeleton(family: Any, config: Any, **arguments: Any) -> nn.Module:
    """The model without memory: every weight is on the meta device."""
    with torch.device("meta"):
        return family.Model(config, **arguments)


def units(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What is sharded, gathered and compiled as one, by name, in the order in which forward uses it.

    The order matters: zero1 gathers weights in it, behind the optimizer and ahead of the next forward.
    """
    rooted = {*getattr(model, "at_root", ())}
    children = [] if shares_weights(model) else [(n, c) for n, c in model.named_children() if n not in rooted]
    held = [(name, child) for name, child in children if any(True for _ in child.parameters())]
    yield from ((name, child) for name, child in held if name not in {"blocks", "head"})
    yield from ((f"blocks.{name}", block) for name, block in model.blocks.items())
    yield from ((name, child) for name, child in held if name == "head")


def shares_weights(model: nn.Module) -> bool:
    """Whether two modules hold one weight (a tied embedding): they must then stay in one unit, the root."""
    return len(list(model.named_parameters(remove_duplicate=False))) != len(list(model.named_parameters()))


def draw(name: str, shape: torch.Size, layers: int, options: Options, device: torch.device) -> Tensor:
    """The initial float32 value of a parameter: ones for norms, zeros for biases, else normal.

    Projections that add to the residual stream are scaled by 1/sqrt(2·layers) (GPT-2). Devices draw different
    numbers from one seed; with `portable` the CPU draws for all of them.
    """
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    where = torch.device("cpu") if options.portable else device
    random = torch.Generator(where).manual_seed(zlib.crc32(name.encode()) + (options.seed << 32))
    residual = name.endswith((".o.weight", ".down.weight"))
    scale = STD / math.sqrt(2 * layers) if residual else STD
    return (torch.randn(shape, device=where, generator=random) * scale).to(device)


def materialise(
    model: nn.Module, module: nn.Module, prefix: str, options: Options, device: torch.device
) -> None:
    """Give every meta weight of `module` (named from `prefix`) its initial value; tied weights stay tied.

    A model that is not ours says by which of our names a weight is drawn, and so starts where ours does.
    """
    ours = getattr(model, "our_name", str)
    done: dict[int, nn.Parameter] = {}
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta:
            continue
        owner, _, leaf = path.rpartition(".")
        if id(parameter) not in done:
            name = f"{prefix}.{path}" if prefix else path
            value = draw(ours(name), parameter.shape, model.config.layers, options, device)
            done[id(parameter)] = nn.Parameter(value)
        setattr(module.get_submodule(owner), leaf, done[id(parameter)])


def finish(model: nn.Module, options: Options, *, gpu: bool) -> None:
    """Compile blocks or model (on a GPU, unless the options say), and recompute activations in backward.

    What recomputes goes inside the block, under its layout's hooks: around it, they would run again in
    backward, and need not do there what they do in forward (FSDP2's casts did not, in torch 2.11 and other
    versions before pytorch/pytorch#182580). The compiled forward goes inside what recomputes.
    """
    compiled = gpu if options.compile is None else options.compile
    again, whole = options.recompute == "full", options.compile_scope == "model"
    if again:
        for block in model.blocks.values():
            inner = compiled and not whole
            forward = torch.compile(block.forward, fullgraph=_one_graph(model)) if inner else block.forward
            block.forward = functools.partial(checkpoint, forward, use_reentrant=False)
    if compiled and (whole or not again):
        compile_in_place(model, options.compile_scope)


def compile_in_place(model: nn.Module, scope: str) -> None:
    """Compile each block, or the model around its layout's hooks.

    In place: a wrapper would hide the hooks of FSDP2 (huggingface/accelerate#4022).
    """
    if scope == "model":
        model.compile()
        return
    for block in model.blocks.values():
        block.compile(fullgraph=_one_graph(model))


def _one_graph(model: nn.Module) -> bool:
    return getattr(model, "whole_graph", True)


def fp8(model: nn.Module, recipe: str) -> None:
    """Swap the blocks' linear layers for torchao's FP8 ones: tensorwise with FP8 all-gather, or row-wise."""
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(
            "--precision fp8 needs torchao; pip install torchao, or use --precision bf16"
        ) from error
    if recipe == "fp8-rowwise":
        config = Float8LinearConfig.from_recipe_name("rowwise")
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "blocks" in name and "router" not in name
    )
