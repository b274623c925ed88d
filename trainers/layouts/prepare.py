"""Prepare a model before a layout shards it.

The steps are initial weights, FP8, tensor parallel, compile and recompute.

In: a model on the meta device, Options. Out: the same model with weights, ready to be sharded.

Weights are drawn per parameter from (seed, name), so they do not depend on the number of ranks, on which
layers a rank holds, or on the order in which it builds them. torch demands this order of the rest: FP8,
tensor parallel, compile with recomputation around it, and only then shard.
"""

from __future__ import annotations

import functools
import math
import zlib
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import initial
from layouts import fp8_weights
from layouts.sharding import Replicate
from models.layers import Part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh

    from models.layers import BlockModel
    from options import Options
    from world import World

BLOCKS = "blocks."  # what the name of a unit that is a block begins with
STD = 0.02  # of initial weights, as GPT-2 and LLM Foundry draw them
FIRST_SEED = 1  # the default of --seed: its weights are those of the committed loss curves


def skeleton(family: Any, config: Any, **arguments: Any) -> BlockModel:
    """The model without memory: every weight is on the meta device."""
    with torch.device("meta"):
        model: BlockModel = family.Model(config, **arguments)
    return model


def prepare(
    model: BlockModel,
    options: Options,
    world: World,
    tp: DeviceMesh | None,
    ready: Callable[[str, nn.Module], None] = lambda _name, _unit: None,
) -> None:
    """Give weights to every unit, and apply everything that must come before sharding.

    Args:
        model: On the meta device.
        options: The job's.
        world: This rank's.
        tp: The mesh of tensor parallel.
        ready: Called with each unit when it can be sharded. A layout that shards it then holds one unit whole
            at a time, and not all of them: 282 GB for 70 billion weights.
    """
    if options.precision.startswith("fp8"):
        use_fp8_linears(model, options)
    for name, unit in list(units(model)):
        give_weights(model, unit, name, options, world.device)
        if tp is not None and tp.size() > 1:
            split(model, name, unit, options, tp)
        if name.startswith(BLOCKS):
            finish_block(model, unit, options, gpu=world.gpu)
        ready(name, unit)
    give_weights(model, model, "", options, world.device)
    finish_model(model, options, gpu=world.gpu)


def units(model: BlockModel) -> Iterator[tuple[str, nn.Module]]:
    """The parts that are sharded, gathered and compiled as one, by name, in forward's order.

    The order matters: zero1 gathers weights in it, behind the optimizer and ahead of the next forward.
    """
    children = (
        [] if ties_weights(model) else [(n, c) for n, c in model.named_children() if n not in model.at_root]
    )
    held = [(name, child) for name, child in children if any(True for _ in child.parameters())]
    yield from ((name, child) for name, child in held if name not in {"blocks", "head"})
    yield from ((f"{BLOCKS}{name}", block) for name, block in model.blocks.items())
    yield from ((name, child) for name, child in held if name == "head")


def ties_weights(model: nn.Module) -> bool:
    """Whether two modules share one weight (a tied embedding). Both must then be in one unit: the root."""
    return len(list(model.named_parameters(remove_duplicate=False))) != len(list(model.named_parameters()))


def initial_value(
    name: str, shape: torch.Size, layers: int, options: Options, device: torch.device
) -> Tensor:
    """The initial float32 value of a parameter: --weights, or ones for norms, zeros for biases, else normal.

    Projections that add to the residual stream are scaled by 1/sqrt(2 x layers), as in GPT-2. Devices draw
    different numbers from one seed; with --portable the CPU draws for all of them. The CPU's generator takes
    32 bits of a seed, so the name and --seed make one checksum of 32 bits: two seeds never make the same one.
    """
    if options.weights is not None:
        return initial.weight(options.weights, options.model, name, shape).to(device)
    if name.endswith(".bias"):
        return torch.zeros(shape, device=device)
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    drawn_on = torch.device("cpu") if options.portable else device
    random = torch.Generator(drawn_on).manual_seed(zlib.crc32(name.encode(), options.seed - FIRST_SEED))
    residual = name.endswith((".o.weight", ".down.weight"))
    scale = STD / math.sqrt(2 * layers) if residual else STD
    return (torch.randn(shape, device=drawn_on, generator=random) * scale).to(device)


def give_weights(
    model: BlockModel, module: nn.Module, prefix: str, options: Options, device: torch.device
) -> None:
    """Give every meta weight of `module` (whose name is `prefix`) its initial value; tied weights stay tied.

    A library's model translates its names to those of this project (`our_name`), and so starts with the same
    weights.
    """
    done: dict[int, nn.Parameter] = {}
    for path, parameter in list(module.named_parameters(remove_duplicate=False)):
        if not parameter.is_meta:
            continue
        owner, _, leaf = path.rpartition(".")
        if id(parameter) not in done:
            name = f"{prefix}.{path}" if prefix else path
            value = initial_value(model.our_name(name), parameter.shape, model.config.layers, options, device)
            done[id(parameter)] = nn.Parameter(
                fp8_weights.like(parameter, value), requires_grad=parameter.requires_grad
            )
        setattr(module.get_submodule(owner), leaf, done[id(parameter)])


def use_fp8_linears(model: nn.Module, options: Options) -> None:
    """Replace the blocks' linear layers by torchao's FP8 ones.

    The scales are tensorwise (in FSDP2 with FP8 all-gather), or row-wise.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise RuntimeError(
            "--precision fp8 needs torchao; pip install torchao, or use --precision bf16"
        ) from error
    if options.precision == "fp8-rowwise":
        config = Float8LinearConfig.from_recipe_name("rowwise")
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=options.parallel == "fsdp2")
    convert_to_float8_training(
        model, config=config, module_filter_fn=lambda _, name: "blocks" in name and "router" not in name
    )


def split(model: BlockModel, name: str, unit: nn.Module, options: Options, tp: DeviceMesh) -> None:
    """Tensor parallel of a unit: the products of a block and of the head; the rest stays whole.

    Heads and hidden units are split by columns, then by rows: attention and the MLP need one all-reduce each.
    """
    if name.startswith(BLOCKS):
        columns = ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up")
        styles = {one: ColwiseParallel() for one in columns}
        styles |= {one: RowwiseParallel() for one in ("attention.o", "mlp.down")}
        present = {one for one, _ in unit.named_modules()}
        parallelize_module(unit, tp, {one: styles[one] for one in styles if one in present})
    elif name == "head" and splits_head(options, model.config):
        split_head(model, tp)


def splits_head(options: Options, config: Any) -> bool:
    """Whether tensor ranks share the head's vocabulary: not a tied embedding's, which is looked up whole.

    In flat buffers the shards of all ranks are equal, elsewhere none may be empty.
    """
    if options.tp == 1 or config.tied:
        return False
    vocab, ranks = int(config.vocab), options.tp
    last = vocab - (ranks - 1) * -(-vocab // ranks)
    return vocab % ranks == 0 if options.parallel == "zero1" else last > 0


def split_head(model: BlockModel, tp: DeviceMesh) -> None:
    """Tensor parallel of the head and its loss: no rank has the logits of all words."""
    head: Any = model.head
    begin = tp.get_local_rank() * -(-head.out.out_features // tp.size())
    parallelize_module(head, tp, {"out": ColwiseParallel(output_layouts=Replicate())})
    head.part = Part(tp.get_group(), begin)


def compiles(options: Options, scope: str, *, gpu: bool) -> bool:
    """Whether torch compiles in this scope: by default on a GPU."""
    return (gpu if options.compile is None else options.compile) and options.compile_scope == scope


def recomputed(model: BlockModel, options: Options) -> set[nn.Module]:
    """The blocks whose activations backward computes again."""
    blocks = list(model.blocks.values())
    return {"none": set(), "half": set(blocks[::2]), "full": set(blocks)}[options.recompute]


def finish_model(model: BlockModel, options: Options, *, gpu: bool) -> None:
    """Compile the whole model if asked to."""
    if compiles(options, "model", gpu=gpu):
        model.compile()


def finish_block(model: BlockModel, block: nn.Module, options: Options, *, gpu: bool) -> None:
    """Compile a block, and recompute its activations in backward, if asked to.

    Recomputation goes inside the block, under its layout's hooks: around them, the hooks would run again in
    backward, where they need not do what they do in forward (FSDP2's casts did not, in torch 2.11 and other
    versions before pytorch/pytorch#182580). The compiled forward goes inside what is recomputed. FSDP2's
    block is compiled in place: a wrapper would hide its hooks (huggingface/accelerate#4022), and the compiler
    leaves them out. It does not leave out ZeRO-1's hooks, which wait for weights, so these stay outside.
    """
    again, inner = block in recomputed(model, options), compiles(options, "block", gpu=gpu)
    if inner and not again and options.parallel != "zero1":
        block.compile(fullgraph=model.whole_graph)
        return
    forward = torch.compile(block.forward, fullgraph=model.whole_graph) if inner else block.forward
    block.forward = functools.partial(checkpoint, forward, use_reentrant=False) if again else forward
