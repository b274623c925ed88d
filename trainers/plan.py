"""What one run will do, settled before it starts. In: Options, Preset, World. Out: a Plan, a Job, a source
of batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

import build
import data
import parallel
import peaks
import presets
from errors import RefusedError

if TYPE_CHECKING:
    from torch import Tensor

    from flops import Flops
    from options import Options
    from parallel import Job
    from peaks import Peak
    from presets import Preset
    from world import World


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a step. `global_batch` = micro_batch x accumulate x data ranks, in samples."""

    seq_len: int
    micro_batch: int
    accumulate: int
    global_batch: int
    lr: float
    unit: str
    units_per_sample: int
    flops: Flops
    peak: Peak

    def numbers(self, step: int, micro: int, job: Job) -> range:
        """The samples of this rank's microbatch: a step's samples are the same on any number of ranks."""
        first = step * self.global_batch + (micro * job.data_size + job.data_rank) * self.micro_batch
        return range(first, first + self.micro_batch)


def settle(options: Options, preset: Preset, world: World) -> Plan:
    """Fill what the options left open; refuse batches that do not divide and devices without a known peak."""
    parallel.check(options, world)
    data_ranks = world.size // (options.tp * options.pp)
    micro = micro_batch(options, preset, data_ranks)
    batch = options.global_batch or micro * data_ranks
    if batch % (micro * data_ranks):
        raise RefusedError(
            f"--global-batch {batch} is not a multiple of micro-batch {micro} x {data_ranks} data ranks"
        )
    seq_len = options.seq_len or preset.seq_len
    return Plan(
        seq_len=seq_len,
        micro_batch=micro,
        accumulate=batch // (micro * data_ranks),
        global_batch=batch,
        lr=options.lr or preset.lr,
        unit=preset.unit,
        units_per_sample=seq_len if preset.unit == "tokens" else 1,
        flops=presets.flops_per_unit(preset, seq_len, recompute=options.recompute == "full"),
        peak=peaks.find(world),
    )


def micro_batch(options: Options, preset: Preset, data_ranks: int) -> int:
    """The asked number of samples, or the preset's, less where a rank's share of the global batch is less."""
    if options.micro_batch != "preset":
        return int(options.micro_batch)
    share = (options.global_batch or 0) // data_ranks
    return min(preset.micro_batch, share) if share else preset.micro_batch


def layout(options: Options, preset: Preset, plan: Plan, world: World) -> Job:
    """The model, spread over the ranks as the options say."""
    family = presets.MODELS[options.model]
    chunks = options.loss_chunks or (8 if world.gpu else 1)
    if options.implementation == "transformers":
        import theirs

        return parallel.Sharded(theirs.skeleton(preset.config, chunks), options, world)
    if options.pp > 1:
        import pipeline

        return pipeline.Pipelined(family, preset.config, chunks, plan=plan, options=options, world=world)
    model = build.skeleton(family, preset.config, loss_chunks=chunks)
    if options.parallel == "zero1":
        import zero1

        return zero1.Zero1(model, options, world)
    if options.parallel != "fsdp2":
        import classic

        return classic.Classic(model, options, world)
    return parallel.Sharded(model, options, world)


class Feed:
    """Batches for a family: tokens and labels for text, what the family itself makes otherwise."""

    def __init__(self, options: Options, preset: Preset, plan: Plan) -> None:
        self.family = presets.MODELS[options.model]
        self.preset, self.seed = preset, options.seed
        self.drawn_on = torch.device("cpu") if options.portable else None
        if hasattr(self.family, "batch"):
            return
        vocab = preset.config.vocab
        self.source = data.open_source(options.data, vocab=vocab, seq_len=plan.seq_len, seed=options.seed)

    def batch(self, numbers: range, device: torch.device) -> dict[str, Tensor]:
        """Keyword arguments of the model's forward."""
        if hasattr(self.family, "batch"):
            made = self.family.batch(self.preset.config, numbers, self.seed, self.drawn_on or device)
            return {name: value.to(device) for name, value in made.items()}
        return data.batch(self.source, numbers, device)


def facts(plan: Plan) -> dict[str, Any]:
    """The plan as part of the record."""
    names = ("seq_len", "micro_batch", "accumulate", "global_batch", "lr")
    return {name: getattr(plan, name) for name in names}
