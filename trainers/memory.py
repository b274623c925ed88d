"""The least memory that a job needs on a device, by arithmetic. In: options, preset, ranks. Out: bytes.

It is a lower bound: state exactly, of the activations only what backward cannot do without, no workspace of
the allocator or of collectives. On H200s it lay 1 to 20 % under what was measured
(tests/trainers/test_memory.py). So a job that does not fit by it cannot run, and is refused before it starts.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import presets
from errors import RefusedError
from layouts import prepare
from models import flux, moe, mpt

if TYPE_CHECKING:
    from options import Options
    from presets import Preset

GIB = 2**30
CHUNKS = 8  # of the loss on a GPU, as layouts/job.py has it


@dataclass(frozen=True, kw_only=True)
class Need:
    """Bytes on each device. FSDP makes `gradients` in backward, and frees activations meanwhile; ZeRO-1's are
    always there.
    """

    state: float
    gradients: float
    gathered: float
    activations: float
    logits: float
    gradients_stay: bool

    @property
    def total(self) -> float:
        """All parts at once: what to plan for."""
        return self.state + self.gradients + self.gathered + self.activations + self.logits

    @property
    def least(self) -> float:
        """What no order of work avoids: the larger of the begin and the end of backward."""
        gradients = self.gradients if self.gradients_stay else 0.0
        begin = self.state + gradients + self.gathered + self.activations + self.logits
        return max(begin, self.state + self.gradients)

    def __str__(self) -> str:
        """The larger sum as arithmetic, in GB of 1e9 bytes."""
        names = ["state", "gathered", "activations", "logits"]
        if self.least == self.state + self.gradients:
            names = ["state", "gradients"]
        elif self.gradients_stay:
            names.insert(1, "gradients")
        return f"{' + '.join(f'{n} {getattr(self, n) / 1e9:.1f}' for n in names)} = {self.least / 1e9:.1f} GB"


def need(options: Options, preset: Preset, *, ranks: int, micro_batch: int) -> Need:
    """The least bytes of each of so many ranks."""
    parameters, outside, largest = _sizes(options.model, preset.config)
    tokens = micro_batch * _tokens(options, preset)
    own = ((parameters - outside) / options.tp + outside) / options.pp
    state, gradients = _state(options, own, ranks)
    return Need(
        state=state,
        gradients=gradients,
        gradients_stay=options.parallel == "zero1" and options.flat_gradients,
        gathered=_gathered(options, parameters, largest),
        activations=_activations(options, preset.config, tokens),
        logits=_logits(options, preset.config, tokens),
    )


def require(options: Options, preset: Preset, *, ranks: int, micro_batch: int, present: float) -> None:
    """Raises RefusedError with the arithmetic, and with flags that fit, if there are any."""
    found = need(options, preset, ranks=ranks, micro_batch=micro_batch)
    if found.least <= present:
        return
    other = fitting(options, preset, ranks=ranks, micro_batch=micro_batch, present=present)
    advice = (
        f"this fits: {other}" if other else "no flag makes it fit: take more GPUs, or --layers for a proxy"
    )
    raise RefusedError(
        f"does not fit: each of {ranks} ranks needs at least {found}, a device has {present / 1e9:.1f} GB; "
        f"{advice}"
    )


def fitting(options: Options, preset: Preset, *, ranks: int, micro_batch: int, present: float) -> str | None:
    """The smallest change of flags that fits: reshard, recompute, then smaller microbatches."""
    changed, said = options, ""
    if not options.reshard:
        changed, said = dataclasses.replace(options, reshard=True), "--reshard"
    steps = [(changed, said)]
    if options.recompute != "full":
        steps.append((dataclasses.replace(changed, recompute="full"), f"{said} --recompute full".strip()))
    for tried, flags in steps:
        if need(tried, preset, ranks=ranks, micro_batch=micro_batch).least <= present:
            return f"{flags} --micro-batch {micro_batch}".strip()
    tried, flags = steps[-1]
    for samples in range(micro_batch - 1, 0, -1):
        if need(tried, preset, ranks=ranks, micro_batch=samples).least <= present:
            return f"{flags} --micro-batch {samples}".strip()
    return None


@functools.cache
def _sizes(family: str, config: Any) -> tuple[int, int, int]:
    """Parameters of the whole model, outside its blocks, and of its two largest units, which are whole at the
    same time.
    """
    model = prepare.skeleton(presets.MODELS[family], config, loss_chunks=1)
    sizes = [sum(weight.numel() for weight in unit.parameters()) for _, unit in prepare.units(model)]
    units = sorted(sizes, reverse=True)
    every = sum(parameter.numel() for parameter in model.parameters())
    blocks = sum(parameter.numel() for parameter in model.blocks.parameters())
    return every, every - blocks, sum(units[:2])


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
    """What backward needs of each block; with recomputation the inputs of all blocks and the whole of one."""
    size = 2 if options.below_fp32 else 4
    layers = getattr(config, "layers", 0) or config.double_blocks + config.single_blocks
    block: float = size * _block_width(config) * tokens / options.tp
    if options.recompute == "full":
        inputs: float = size * config.width * tokens * layers / options.pp
        return inputs + block
    every: float = block * layers / options.pp
    return every


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
    """One chunk in two bytes, and once in float32."""
    chunks = options.loss_chunks or CHUNKS
    return 6 * getattr(config, "vocab", 0) * tokens / chunks
