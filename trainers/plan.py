"""The sizes of a step, decided before the run starts. In: Options, Preset, World. Out: a Plan."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import memory
import order
import peaks
import presets
from errors import RefusedError
from layouts import job

if TYPE_CHECKING:
    from flops import Flops
    from layouts.job import Job
    from options import Options
    from peaks import Peak
    from presets import Preset
    from world import World


RECOMPUTED = {"none": 0.0, "half": 0.5, "full": 1.0}  # share of the blocks that run forward again


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes of a step. `global_batch` = micro_batch x accumulate x data ranks, in samples.

    `unit`: tokens or images, what speed counts. `peak`: of this device, by its datasheet.
    """

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
        """The samples of this rank's microbatch. A step has the same samples on any number of ranks."""
        first = step * self.global_batch + (micro * job.data_size + job.data_rank) * self.micro_batch
        return range(first, first + self.micro_batch)

    def following(self, step: int, micro: int) -> tuple[int, int]:
        """Step and number of the microbatch after this one."""
        return (step, micro + 1) if micro + 1 < self.accumulate else (step + 1, 0)

    def identity(self, options: Options, digest: str | None) -> dict[str, Any]:
        """What decides the samples of each step, their order, and the learning rate, by flag."""
        names = ("model", "size", "layers", "seed", "pack", "steps", "lr_warmup", "weight_decay", "labels")
        found = {f"--{name.replace('_', '-')}": getattr(options, name) for name in names}
        found |= {"--seq-len": self.seq_len, "--global-batch": self.global_batch, "--lr": self.lr}
        if options.data not in {"synthetic", "text"}:
            found["order of rows"] = order.VERSION
        return found | {"--data": digest or Path(options.data).name}  # a folder may move, its samples stay

    def facts(self) -> dict[str, Any]:
        """The plan as part of the record."""
        names = ("seq_len", "micro_batch", "accumulate", "global_batch", "lr")
        return {name: getattr(self, name) for name in names}


def settle(options: Options, preset: Preset, world: World) -> Plan:
    """Fill in what the options left open.

    Refuses batches that do not divide, and devices without a known peak.
    """
    job.check_ranks(options, preset, world)
    data_ranks = world.size // (options.tp * options.pp)
    micro = micro_batch(options, preset, data_ranks)
    batch = options.global_batch or micro * data_ranks
    if batch % (micro * data_ranks):
        raise RefusedError(
            f"--global-batch {batch} is not a multiple of {micro * data_ranks}: micro-batch {micro} x "
            f"{data_ranks} data ranks; change --global-batch or --micro-batch"
        )
    memory.require(
        options, preset, ranks=world.size, micro_batch=micro, present=world.memory(), on_gpu=world.gpu
    )
    seq_len = options.seq_len or preset.seq_len
    return Plan(
        seq_len=seq_len,
        micro_batch=micro,
        accumulate=batch // (micro * data_ranks),
        global_batch=batch,
        lr=preset.lr if options.lr is None else options.lr,
        unit=preset.unit,
        units_per_sample=seq_len if preset.unit == "tokens" else 1,
        flops=presets.flops_per_unit(preset, seq_len, recompute=RECOMPUTED[options.recompute]),
        peak=peaks.find(world),
    )


def micro_batch(options: Options, preset: Preset, data_ranks: int) -> int:
    """Samples of each rank in a microbatch: --micro-batch, or the preset's.

    They are never more than a rank's share of a step.
    """
    if options.micro_batch != "preset":
        return int(options.micro_batch)
    share = (options.global_batch or 0) // data_ranks
    return min(preset.micro_batch, share) if share else preset.micro_batch
