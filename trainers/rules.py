"""Which flags of train.py cannot work together. In: Options. Out: the first reason, or None."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from options import Options

COUNTS = (
    "steps", "until", "layers", "global_batch", "tp", "pp", "replicas", "loss_chunks",
    "checkpoint_every", "full_every",
    "validate_every", "validation_batches",
)  # fmt: skip


def contradiction(options: Options) -> str | None:
    """The first reason why these options cannot run together."""
    rules = (*_of_layouts(options), *_of_models(options), *_of_steps(options))
    return next((reason for broken, reason in rules if broken), None)


def _of_layouts(options: Options) -> tuple[tuple[bool, str], ...]:
    """Rules on how ranks share a model. Each: whether it is broken, and what to say then."""
    model_parallel = options.tp * options.pp > 1
    return (
        (
            model_parallel and options.parallel not in {"fsdp2", "zero1"},
            "--tp and --pp work with --parallel fsdp2 and zero1 only",
        ),
        (
            model_parallel and options.parallel == "zero1" and options.precision.startswith("fp8"),
            "--parallel zero1 has FP8 in the fused layer alone, of whole weights; with --tp, --pp take fsdp2",
        ),
        (
            options.tp > 1 and options.model in {"moe", "flux"},
            f"--tp does not work with --model {options.model}",
        ),
        (
            options.pp > 1 and options.model in {"flux", "moe"},
            f"--pp does not work with --model {options.model}",
        ),
        (
            model_parallel and options.implementation != "native",
            "--tp and --pp work with --implementation native only",
        ),
        (
            options.reduce_each and not (options.parallel == "fsdp2" and options.pp == 1),
            "--reduce-each works with --parallel fsdp2, without --pp only",
        ),
        (
            options.replicas > 1 and options.parallel not in {"fsdp2", "hybrid_shard"},
            "--replicas works with --parallel fsdp2 and hybrid_shard only",
        ),
    )


def _of_models(options: Options) -> tuple[tuple[bool, str], ...]:
    """Rules on models and their implementations."""
    return (
        (
            options.implementation == "transformers"
            and not (options.model == "llama" and options.parallel == "fsdp2" and options.precision != "fp8"),
            "--implementation transformers works with llama, --parallel fsdp2, fp32 or bf16 only",
        ),
        (
            options.implementation == "fused" and not (options.parallel == "zero1" and _fusible(options)),
            "--implementation fused works with llama, mistral, --parallel zero1, --precision bf16, fp8 only",
        ),
        (
            options.parallel == "zero1"
            and options.precision.startswith("fp8")
            and options.implementation != "fused",
            "--parallel zero1 with fp8 needs --implementation fused",
        ),
        (
            not options.flat_gradients and not _keeps_gradients(options),
            "--no-flat-gradients needs --parallel zero1, native, no --tp, --pp, and --reduce bf16 below fp32",
        ),
        (
            options.lean and options.model not in {"moe", "flux"},
            f"--lean works with --model moe and flux only, not {options.model}",
        ),
        (
            (options.seq_len or 0) < 0 or (options.seq_len == 0 and options.model != "flux"),
            f"--seq-len {options.seq_len}: expected 1 or more; leave it out for the size's",
        ),
        (
            options.labels is not None and (options.pack is not None or options.pp > 1),
            "--labels does not work with --pack and --pp",
        ),
        (
            options.labels is not None and options.model == "moe",
            "--labels does not work with --model moe, whose balance loss is of all tokens",
        ),
        (
            options.pack == "masked" and not _masks_documents(options),
            "--pack masked works with llama, moe, mpt and gpt, native, without --pp; take --pack concat",
        ),
    )


def _of_steps(options: Options) -> tuple[tuple[bool, str], ...]:
    """Rules on how long a job runs and when it saves."""
    counts = {name: getattr(options, name) for name in COUNTS}
    small = [
        f"--{name.replace('_', '-')} {value}"
        for name, value in counts.items()
        if value is not None and value < 1
    ]
    return (
        (bool(small), f"{', '.join(small)}: expected 1 or more; leave a flag out for its default"),
        (
            options.micro_batch != "preset" and not options.micro_batch.strip("0").isdigit(),
            f"--micro-batch {options.micro_batch}: expected 1 or more, or preset",
        ),
        (
            not 0 <= options.weight_decay < math.inf,
            f"--weight-decay {options.weight_decay}: expected 0 or more",
        ),
        (options.lr is not None and not 0 <= options.lr < math.inf, f"--lr {options.lr}: expected 0 or more"),
        (
            not 0 <= options.lr_warmup < max(1, options.steps),
            f"--lr-warmup {options.lr_warmup} never reaches the peak in --steps {options.steps}; give fewer",
        ),
        (
            options.full_every % max(1, options.checkpoint_every) != 0,
            f"--full-every must be a multiple of --checkpoint-every {options.checkpoint_every}",
        ),
        (
            (options.validate_every is None) != (options.validation_data is None),
            "--validate-every and --validation-data work together only; give both or none",
        ),
        (
            options.validate_every is not None and options.pp > 1,
            "--validate-every does not work with --pp, whose stages run forward and backward in one schedule",
        ),
        (
            options.until is not None and not 0 < options.until <= options.steps,
            f"--until {options.until} must be between 1 and --steps {options.steps}",
        ),
    )


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
