"""The least memory that a job needs on a device, by arithmetic. In: options, preset, ranks. Out: bytes.

It is a lower bound: state exactly, of the activations only what backward cannot do without, no workspace of
the allocator or of collectives. On H200s it lay 1 to 20 % under what was measured
(tests/trainers/test_memory.py). So a job that does not fit by it cannot run, and is refused before it starts.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import presets
from errors import RefusedError
from fused import layer as fused
from layouts import prepare
from models import flux, layers, moe, mpt

if TYPE_CHECKING:
    from options import Options, Recompute
    from presets import Preset

GIB = 2**30
DRAWN = 8  # bytes of a float32 weight while it is drawn: the numbers, and the numbers scaled


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on each device.

    FSDP makes `gradients` in backward, and frees activations meanwhile; ZeRO-1's are always there, and so are
    FSDP2's from one microbatch of a step to the next. `making`: what ZeRO-1 needs for the largest weight
    while it is drawn, beside its state. `whole`: all weights in float32, which FSDP1 has on each device until
    it shards them. `between`: weights that FSDP2 keeps gathered after a microbatch.
    """

    state: float
    gradients: float
    gathered: float
    activations: float
    logits: float
    gradients_stay: bool
    making: float = 0.0
    whole: float = 0.0
    between: float = 0.0

    @property
    def total(self) -> float:
        """All parts at once: what to plan for."""
        return self.state + self.gradients + self.gathered + self.activations + self.logits

    @property
    def least(self) -> float:
        """What no order of work avoids: the largest of the build, and the begin and the end of backward."""
        return max(sum(parts.values()) for parts in self._moments())

    def _moments(self) -> list[dict[str, float]]:
        """The parts that are held together, for each moment of a job."""
        state = {"state": self.state}
        if self.gradients_stay:
            state["gradients"] = self.gradients
        forward = {"gathered": self.gathered, "activations": self.activations, "logits": self.logits}
        build = {"weights being drawn": self.making}
        backward = {"state": self.state, "gradients": self.gradients}
        between = backward | {"gathered": self.between}
        whole = {"weights before sharding": self.whole}
        return [state | forward, between if self.between else backward, state | build, whole]

    def __str__(self) -> str:
        """The larger sum as arithmetic, in GB of 1e9 bytes."""
        parts = max(self._moments(), key=lambda parts: sum(parts.values()))
        said = " + ".join(f"{name} {value / 1e9:.1f}" for name, value in parts.items())
        return f"{said} = {self.least / 1e9:.1f} GB"


def need(options: Options, preset: Preset, *, ranks: int, micro_batch: int) -> Need:
    """The least bytes that each of `ranks` ranks needs."""
    parameters, outside, largest, matrix = _sizes(options.model, preset.config)
    tokens = micro_batch * _tokens(options, preset)
    config = preset.config
    head = config.vocab * config.width if prepare.splits_head(options, config) else 0
    shared = parameters - outside + head
    own = (shared / options.tp + parameters - shared) / options.pp
    state, gradients = _state(options, own, ranks)
    several = _has_several_microbatches(options, ranks, micro_batch)
    adds_up = several and not options.reduce_each
    if adds_up:
        gradients = own * (2 if options.reduce == "bf16" else 4)
    return Need(
        state=state,
        gradients=gradients,
        gradients_stay=adds_up or (options.parallel == "zero1" and options.flat_gradients),
        gathered=_gathered(options, parameters, largest),
        activations=_activations(options, preset.config, tokens),
        logits=_logits(options, preset.config, tokens) / (options.tp if head else 1),
        making=DRAWN * matrix if options.parallel == "zero1" else 0.0,
        whole=0.0 if options.parallel in {"fsdp2", "zero1"} else 4.0 * parameters,
        between=own * (2 if options.below_fp32 else 4) if several else 0.0,
    )


def _has_several_microbatches(options: Options, ranks: int, micro_batch: int) -> bool:
    """Whether FSDP2 keeps gathered weights, and without --reduce-each gradients, between microbatches."""
    at_once = micro_batch * max(1, ranks // (options.tp * options.pp))
    return options.parallel == "fsdp2" and options.pp == 1 and (options.global_batch or 0) > at_once


def require(
    options: Options, preset: Preset, *, ranks: int, micro_batch: int, present: float, on_gpu: bool = True
) -> None:
    """Raises RefusedError with the arithmetic, and with flags that fit, if there are any."""
    found = need(options, preset, ranks=ranks, micro_batch=micro_batch)
    if found.least <= present:
        return
    other = fitting(options, preset, ranks=ranks, micro_batch=micro_batch, present=present)
    advice = (
        f"this fits: {other}" if other else "no flag makes it fit: take more GPUs, or --layers for a proxy"
    )
    has = f"{'a device has' if on_gpu else 'its share of the host is'} {present / 1e9:.1f} GB"
    raise RefusedError(f"does not fit: each of {ranks} ranks needs at least {found}, {has}; {advice}")


def fitting(options: Options, preset: Preset, *, ranks: int, micro_batch: int, present: float) -> str | None:
    """The smallest change of flags that fits: reshard, recompute half or all, then smaller microbatches."""
    changed, said = options, ""
    if not options.reshard:
        changed, said = dataclasses.replace(options, reshard=True), "--reshard"
    steps = [(changed, said)]
    more: dict[str, tuple[Recompute, ...]] = {"none": ("half", "full"), "half": ("full",), "full": ()}
    steps += [
        (dataclasses.replace(changed, recompute=blocks), f"{said} --recompute {blocks}".strip())
        for blocks in more[options.recompute]
    ]
    for tried, flags in steps:
        if need(tried, preset, ranks=ranks, micro_batch=micro_batch).least <= present:
            return f"{flags} --micro-batch {micro_batch}".strip()
    tried, flags = steps[-1]
    for samples in range(micro_batch - 1, 0, -1):
        if need(tried, preset, ranks=ranks, micro_batch=samples).least <= present:
            return f"{flags} --micro-batch {samples}".strip()
    return None


@functools.cache
def _sizes(family: str, config: Any) -> tuple[int, int, int, int]:
    """Numbers of parameters that decide the need of memory.

    They are those of the whole model, those outside its blocks, those of its two largest units, which are
    whole at the same time, and those of its largest weight.
    """
    model = prepare.skeleton(presets.MODELS[family], config, loss_chunks=1)
    sizes = [sum(weight.numel() for weight in unit.parameters()) for _, unit in prepare.units(model)]
    units = sorted(sizes, reverse=True)
    every = sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    largest = max(parameter.numel() for parameter in model.parameters())
    return every, every - blocks, sum(units[:2]), largest


def _tokens(options: Options, preset: Preset) -> int:
    config = preset.config
    if isinstance(config, flux.Config):
        return config.side**2 + config.text_tokens
    return options.seq_len or preset.seq_len


def _state(options: Options, own: float, ranks: int) -> tuple[float, float]:
    """Weights with moments, and gradients. `own`: weights of this rank's part under --tp and --pp."""
    sharers = max(1, ranks // (options.tp * options.pp * options.replicas))
    if options.parallel == "zero1":
        half = options.below_fp32
        share = (2 if half else 0) + (4 if options.moments == "bf16" else 8)
        gradients = 2 if half and options.reduce == "bf16" else 4
        return own * ((2 if half else 4) + share / sharers), own * gradients
    own /= 1 if options.parallel == "no_shard" else sharers
    return own * 12, own * 4


def _gathered(options: Options, parameters: int, largest: int) -> float:
    """Whole weights beside the shards."""
    if options.parallel in {"zero1", "no_shard"}:
        return 0.0
    size = 2 if options.below_fp32 else 4
    kept = options.parallel == "shard_grad_op" or (options.parallel == "fsdp2" and not options.reshard)
    return size * (parameters if kept else largest) / (options.tp * options.pp)


def _activations(options: Options, config: Any, tokens: int) -> float:
    """What backward needs of each block; with recomputation the inputs of all blocks and the whole of one.

    With `half` the first, third, … block of a stage keep their input (layouts/prepare.py). Backward has most
    when it begins: the last block is then whole, and so are the even ones before it.
    """
    size = 2 if options.below_fp32 else 4
    blocks: float = config.layers / options.pp
    block: float = size * _block_width(config) * tokens / options.tp
    only_input: float = size * config.width * tokens
    if options.recompute == "full":
        return only_input * blocks + block
    if options.recompute == "half":
        return only_input * math.floor(blocks / 2) + block * math.ceil(blocks / 2)
    return block * blocks


def _block_width(config: Any) -> int:
    """Values of a token that backward of one block reads: inputs of norms, products and attention."""
    width: int = config.width
    if isinstance(config, mpt.Config | flux.Config):
        return 10 * width  # x, q, k, v, attention's output, the second x, and the hidden layer (4 x)
    heads, hidden = 2 * config.kv_heads * config.head_dim, 2 * config.ffn
    experts = config.active_experts if isinstance(config, moe.Config) else 1
    wide: int = 3 * width + config.heads * config.head_dim + heads + hidden * experts
    return wide


def _logits(options: Options, config: Any, tokens: int) -> float:
    """The logits of one chunk, which become their gradient in place; whole ones also twice in float32."""
    size = 2 if options.below_fp32 else 4
    if options.implementation == "fused":
        chunks = -(-tokens // fused.CHUNK)  # it has chunks of its own
    else:
        chunks = options.loss_chunks or -(-tokens // layers.ROWS)
        size += 8 if options.loss_chunks == layers.WHOLE else 0
    return size * getattr(config, "vocab", 0) * math.ceil(tokens / chunks)
