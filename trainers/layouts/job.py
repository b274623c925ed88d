"""What train.py needs from a layout, and the layout that a run gets.

In: Options, Preset, Plan, World. Out: a Job: a model spread over the ranks, with its optimizer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import presets
from errors import RefusedError
from layouts import prepare
from models.layers import BY_ROWS, WHOLE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Size, Tensor

    from options import Options
    from plan import Plan
    from presets import Preset
    from world import World


class Job(Protocol):
    """A model spread over the ranks, with its optimizer."""

    data_rank: int
    data_size: int

    @property
    def model(self) -> object:
        """The model as this rank holds it."""

    def microbatch(self, batch: dict[str, Tensor], *, last: bool, share: float) -> Tensor:
        """Forward, and backward of share x loss. Returns the loss, detached.

        Gradients add up on each rank; with the `last` microbatch of a step they are reduced over the ranks.
        """

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """This rank's loss of a microbatch, by forward alone; it changes nothing. Not with a pipeline."""

    def step(self, lr: float) -> Tensor:
        """Clip the gradients, update the weights, clear the gradients. Returns the norm before clipping."""

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores. Loading fills it in place; `restore` then takes it over."""

    def restore(self, state: dict[str, Any]) -> None:
        """Take over a loaded state."""

    def state_bytes(self) -> int:
        """Bytes of the optimizer's state on this rank: moments, and what it keeps to make weights exact."""

    def shapes(self) -> dict[str, Size]:
        """The shape of each whole weight, in the order of names. With a pipeline a collective call."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight whole, in float32 on the CPU of every rank, in the order of names.

        It is made when it is asked for, by all ranks together: every rank takes all, and holds one.
        """


def create(options: Options, preset: Preset, plan: Plan, world: World) -> Job:
    """The job of this layout. Only the module of the layout that runs is imported."""
    from layouts import fsdp2

    family = presets.MODELS[options.model]
    chunks = options.loss_chunks or (BY_ROWS if world.gpu else WHOLE)
    if options.implementation == "transformers":
        from models import hf_llama

        return fsdp2.Fsdp2(hf_llama.skeleton(preset.config, chunks), options, world)
    if options.pp > 1:
        from layouts import pipeline

        return pipeline.create(family, preset.config, chunks, plan=plan, options=options, world=world)
    model = prepare.skeleton(family, preset.config, loss_chunks=chunks)
    if options.parallel == "zero1":
        from layouts import zero1

        return zero1.Zero1(model, options, world)
    if options.parallel != "fsdp2":
        from layouts import fsdp1

        return fsdp1.Fsdp1(model, options, world)
    return fsdp2.Fsdp2(model, options, world)


def check_ranks(options: Options, preset: Preset, world: World) -> None:
    """Refuse ranks that --pp, --replicas and --tp do not divide, and heads that --tp does not."""
    outer = options.pp * options.replicas * options.tp
    if world.size % outer:
        raise RefusedError(
            f"{world.size} ranks cannot be divided by pp {options.pp} x replicas {options.replicas} x "
            f"tp {options.tp}; start a multiple of {outer} ranks, or change these flags"
        )
    # FSDP2 takes uneven shards of the hidden layer; in flat buffers those of all tensor ranks are equal.
    names = ("heads", "kv_heads", "ffn") if options.parallel == "zero1" else ("heads", "kv_heads")
    sizes = {name: getattr(preset.config, name, 0) for name in names}
    odd = [f"{size} {name}" for name, size in sizes.items() if size % options.tp]
    if odd:
        raise RefusedError(
            f"--tp {options.tp} with --parallel {options.parallel} splits the model's {' and '.join(odd)} "
            "unevenly; give a --tp that divides them"
        )
    if options.tp > 1 and getattr(preset.config, "alibi", False):
        raise RefusedError(
            f"--tp splits the heads, and the ALiBi of --size {options.size} is made for all of them; "
            "leave --tp out"
        )


def kept_as(options: Options, preset: Preset) -> str | None:
    """What a checkpoint must fit to be loaded: flat buffers depend on how --tp and --pp split the model.

    None where torch's own state of a model is kept, which fits them all.
    """
    tied = getattr(preset.config, "tied", False)
    # Before 2026-11-25 zero1 kept buffers with their padding, not rows.
    # Before 2026-11-23 a pipeline untied a tied embedding, and one buffer of zero1 held all of such a model.
    copies = ", with copies of the tied embedding" if tied and options.pp > 1 else ""
    if options.parallel != "zero1":
        return f"{options.parallel} with --pp{copies}" if copies else None
    # Before 2026-11-26 each tensor rank had the whole head.
    apart = ", blocks apart" if tied and options.pp == 1 else ""
    apart += ", head split" if prepare.splits_head(options, preset.config) else ""
    return f"zero1 --tp {options.tp} --pp {options.pp}, in rows{apart}{copies}"


def facts(options: Options, job: Job, state_bytes: int) -> dict[str, Any]:
    """The layout as part of the record. `state_bytes`: of the optimizer, on the rank that has most."""
    return {
        "parallel": options.parallel,
        "data": job.data_size,
        "tensor": options.tp,
        "pipeline": options.pp,
        "optimizer_bytes_per_rank": state_bytes,
    }


def mesh(options: Options, world: World) -> DeviceMesh:
    """Dimensions pp, replicas, shard, tp.

    Neighbouring ranks share a node, so tp comes last: it talks most.
    """
    outer = options.pp * options.replicas * options.tp
    sizes = (options.pp, options.replicas, world.size // outer, options.tp)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("pp", "replicas", "shard", "tp"))
