"""Which flags of train.py cannot work together. In: Options. Out: the first reason, or None."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from options import Options

COUNTS = (
    "steps", "until", "layers", "global_batch", "tp", "pp", "replicas", "loss_chunks",
    "checkpoint_every", "full_every",
    "validate_every", "validation_batches",
)  # fmt: skip


def contradiction(options: Options) -> str | None:
    """The first reason why these options cannot run together."""
    return next(chain(_of_layouts(options), _of_models(options), _of_steps(options)), None)


def _of_layouts(options: Options) -> Iterator[str]:
    """What is wrong with how ranks share a model."""
    model_parallel = options.tp * options.pp > 1
    if model_parallel and options.parallel not in {"fsdp2", "zero1"}:
        yield "--tp and --pp work with --parallel fsdp2 and zero1 only"
    if model_parallel and options.parallel == "zero1" and options.precision.startswith("fp8"):
        yield "--parallel zero1 has FP8 in the fused layer alone, of whole weights; for --tp, --pp take fsdp2"
    for flag, ranks in (("--tp", options.tp), ("--pp", options.pp)):
        if ranks > 1 and options.model in {"moe", "flux"}:
            yield f"{flag} does not work with --model {options.model}"
    if model_parallel and options.implementation != "native":
        yield "--tp and --pp work with --implementation native only"
    if options.reduce_each and not (options.parallel == "fsdp2" and options.pp == 1):
        yield "--reduce-each works with --parallel fsdp2, without --pp only"
    if options.replicas > 1 and options.parallel not in {"fsdp2", "hybrid_shard"}:
        yield "--replicas works with --parallel fsdp2 and hybrid_shard only"


def _of_models(options: Options) -> Iterator[str]:
    """What is wrong with a model and its implementation."""
    if options.implementation == "transformers" and not (
        options.model == "llama" and options.parallel == "fsdp2" and options.precision != "fp8"
    ):
        yield "--implementation transformers works with llama, --parallel fsdp2, fp32 or bf16 only"
    if options.implementation == "fused" and not (options.parallel == "zero1" and _fusible(options)):
        yield "--implementation fused works with llama, mistral, --parallel zero1, --precision bf16, fp8 only"
    if (
        options.parallel == "zero1"
        and options.precision.startswith("fp8")
        and options.implementation != "fused"
    ):
        yield "--parallel zero1 with fp8 needs --implementation fused"
    if not options.flat_gradients and not _keeps_gradients(options):
        yield "--no-flat-gradients needs --parallel zero1, native, no --tp, --pp; --reduce bf16 below fp32"
    if options.lean and options.model not in {"moe", "flux"}:
        yield f"--lean works with --model moe and flux only, not {options.model}"
    if (options.seq_len or 0) < 0 or (options.seq_len == 0 and options.model != "flux"):
        yield f"--seq-len {options.seq_len}: expected 1 or more; leave it out for the size's"
    if options.labels is not None and (options.pack is not None or options.pp > 1):
        yield "--labels does not work with --pack and --pp"
    if options.labels is not None and options.model == "moe":
        yield "--labels does not work with --model moe, whose balance loss is of all tokens"
    if options.pack == "masked" and not _masks_documents(options):
        yield "--pack masked works with llama, moe, mpt and gpt, native, without --pp; take --pack concat"


def _of_steps(options: Options) -> Iterator[str]:
    """What is wrong with how long a job runs and when it saves."""
    counts = {f"--{name.replace('_', '-')}": getattr(options, name) for name in COUNTS}
    if small := [f"{flag} {value}" for flag, value in counts.items() if value is not None and value < 1]:
        yield f"{', '.join(small)}: expected 1 or more; leave a flag out for its default"
    if options.micro_batch != "preset" and not options.micro_batch.strip("0").isdigit():
        yield f"--micro-batch {options.micro_batch}: expected 1 or more, or preset"
    if not 0 <= options.weight_decay < math.inf:
        yield f"--weight-decay {options.weight_decay}: expected 0 or more"
    if options.lr is not None and not 0 <= options.lr < math.inf:
        yield f"--lr {options.lr}: expected 0 or more"
    if not 0 <= options.lr_warmup < max(1, options.steps):
        yield f"--lr-warmup {options.lr_warmup} never reaches the peak in --steps {options.steps}; give fewer"
    if options.full_every % max(1, options.checkpoint_every) != 0:
        yield f"--full-every must be a multiple of --checkpoint-every {options.checkpoint_every}"
    if (options.validate_every is None) != (options.validation_data is None):
        yield "--validate-every and --validation-data work together only; give both or none"
    if options.validate_every is not None and options.pp > 1:
        yield "--validate-every does not work with --pp, whose stages run both ways in one schedule"
    if options.until is not None and not 0 < options.until <= options.steps:
        yield f"--until {options.until} must be between 1 and --steps {options.steps}"


def _fusible(options: Options) -> bool:
    return options.model in {"llama", "mistral"} and options.precision in {"bf16", "fp8"}


def _masks_documents(options: Options) -> bool:
    return (
        options.model in {"llama", "moe", "mpt", "gpt"}
        and options.implementation == "native"
        and options.pp == 1
    )


def _keeps_gradients(options: Options) -> bool:
    """Whether autograd makes gradients of the type in which they are summed, and no rank shares them."""
    same_type = options.reduce == "bf16" or not options.below_fp32
    alone = options.parallel == "zero1" and options.tp * options.pp == 1
    return alone and same_type and options.implementation == "native"
