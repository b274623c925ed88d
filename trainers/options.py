"""The command line of the trainer: flags in, one frozen Options out. Combinations that cannot work are
refused here.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path

import presets

PARALLEL = ("fsdp2", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "zero1")
PRECISION = ("fp32", "bf16", "fp8", "fp8-rowwise")
ATTENTION = ("auto", "cudnn", "flash", "efficient", "math")


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. None means the preset's value, or what suits the device; see --help."""

    model: str
    size: str
    layers: int | None
    implementation: str
    steps: int
    until: int | None
    warmup: int
    warmup_s: float
    budget_s: float | None
    seq_len: int | None
    micro_batch: str
    global_batch: int | None
    lr: float | None
    lr_warmup: int
    clip: float
    seed: int
    data: str
    precision: str
    parallel: str
    tp: int
    pp: int
    replicas: int
    reshard: bool
    reduce: str
    moments: str
    loss_chunks: int | None
    compile: bool | None
    compile_scope: str
    attention: str
    recompute: str
    device: str
    deterministic: bool
    portable: bool
    preflight: bool | None
    phase_limit_s: float
    checkpoint: Path | None
    checkpoint_every: int
    full_every: int
    asynchronous: bool
    resume: bool
    record: Path | None
    profile: bool
    backend_check: bool
    price_per_hour: float | None
    digest: bool


def parse(arguments: list[str]) -> Options:
    """Options of these arguments; exits with 2 and one line when they contradict each other."""
    parser = _parser()
    options = Options(**vars(parser.parse_args(arguments)))
    problem = contradiction(options)
    if problem:
        parser.error(problem)
    return options


def contradiction(options: Options) -> str | None:
    """The first reason why these options cannot run together."""
    model_parallel = options.tp * options.pp > 1
    rules = (
        (model_parallel and options.parallel != "fsdp2", "--tp and --pp work with --parallel fsdp2 only"),
        (options.tp > 1 and options.precision.startswith("fp8"), "--tp works with fp32 and bf16 only"),
        (
            options.tp > 1 and options.model in {"moe", "flux"},
            f"--tp is not defined for --model {options.model}",
        ),
        (
            options.pp > 1 and options.model in {"flux", "moe"},
            f"--pp is not defined for --model {options.model}",
        ),
        (
            options.implementation == "transformers"
            and not (options.model == "llama" and options.parallel == "fsdp2" and options.precision != "fp8"),
            "--implementation transformers is for llama, --parallel fsdp2, fp32 or bf16",
        ),
        (model_parallel and options.implementation != "native", "--tp and --pp need --implementation native"),
        (
            options.implementation == "fused" and not (options.parallel == "zero1" and _fusible(options)),
            "--implementation fused is for llama and mistral's full window, --parallel zero1, bf16 or fp8",
        ),
        (
            options.parallel == "zero1"
            and options.precision.startswith("fp8")
            and options.implementation != "fused",
            "--parallel zero1 with fp8 needs --implementation fused",
        ),
        (
            options.replicas > 1 and options.parallel not in {"fsdp2", "hybrid_shard"},
            "--replicas is for --parallel fsdp2 and hybrid_shard",
        ),
        (
            options.full_every % options.checkpoint_every != 0,
            "--full-every is a multiple of --checkpoint-every",
        ),
        (options.until is not None and not 0 < options.until <= options.steps, "--until is within --steps"),
    )
    return next((reason for broken, reason in rules if broken), None)


def _fusible(options: Options) -> bool:
    return options.model == "llama" and options.precision in {"bf16", "fp8"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchrun --nproc-per-node N trainers/train.py",
        description="Train one model end to end and print one JSON record.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _what(parser.add_argument_group("what"))
    _how(parser.add_argument_group("how"))
    _files(parser.add_argument_group("files"))
    missing = {field.name for field in fields(Options)} - {action.dest for action in parser._actions}  # noqa: SLF001
    assert not missing, missing
    return parser


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", choices=presets.families(), default="llama", help="family")
    add("--size", default="tiny", help="name in presets.py")
    add("--layers", type=int, help="width-true proxy with this many layers")
    add(
        "--implementation",
        choices=("native", "fused", "transformers"),
        default="native",
        help="whose forward runs",
    )
    add("--steps", type=int, default=20, help="optimizer steps in all, resumed ones included")
    add("--until", type=int, help="end after this step of --steps; the learning rate goes by --steps")
    add("--warmup", type=int, default=3, help="steps of this run that are not timed")
    add("--warmup-s", type=float, default=0.0, help="and seconds: a chip meets its power cap after a minute")
    add("--budget-s", type=float, help="end at the next step when this run has lasted so long")
    add("--seq-len", type=int, help="tokens a sequence")
    add(
        "--micro-batch",
        default="preset",
        help="samples a GPU and microbatch: a number, or preset (tune.py searches)",
    )
    add("--global-batch", type=int, help="sequences a step over all GPUs; accumulates what does not fit")
    add("--lr", type=float, help="peak learning rate")
    add("--lr-warmup", type=int, default=10, help="steps of linear warm-up, then cosine to a tenth")
    add("--clip", type=float, default=1.0, help="largest global gradient norm")
    add("--seed", type=int, default=1, help="of weights and data; the same on every number of GPUs")
    add(
        "--data",
        default="synthetic",
        help="synthetic, text (shipped), or a folder of MosaicML streaming shards",
    )


def _how(group: argparse._ArgumentGroup) -> None:
    add, toggle = group.add_argument, argparse.BooleanOptionalAction
    add("--precision", choices=PRECISION, default="fp32", help="bf16 keeps float32 master weights")
    add("--parallel", choices=PARALLEL, default="fsdp2", help="how parameters and state are shared")
    add("--tp", type=int, default=1, help="tensor parallel ranks, inside one node")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--replicas", type=int, default=1, help="HSDP: groups that each hold a whole sharded copy")
    add("--reshard", action=toggle, default=True, help="free gathered weights between forward and backward")
    add("--reduce", choices=("fp32", "bf16"), default="fp32", help="type in which gradients are summed")
    add("--moments", choices=("fp32", "bf16"), default="fp32", help="type of AdamW's moments (zero1)")
    add("--loss-chunks", type=int, help="pieces of the loss; 1 holds all logits")
    add("--compile", action=toggle, help="torch.compile; default: on a GPU")
    add("--compile-scope", choices=("block", "model"), default="block", help="what is compiled as one")
    add("--attention", choices=ATTENTION, default="auto", help="backend; auto tries cuDNN first on NVIDIA")
    add(
        "--recompute", choices=("none", "full"), default="none", help="activation checkpointing of each block"
    )
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda is ROCm's name too")
    add("--deterministic", action=toggle, default=False, help="refuse kernels that may differ between runs")
    add(
        "--portable",
        action=toggle,
        default=False,
        help="draw weights and synthetic inputs on the CPU: the same on every device",
    )
    add("--preflight", action=toggle, help="measure GEMM, copy and collectives first; default: on a GPU")
    add(
        "--phase-limit-s",
        type=float,
        default=600,
        help="a phase, or a step, that lasts longer ends the run with every rank's stacks",
    )
    add("--price-per-hour", type=float, help="of one GPU in dollars; adds the cost of a million tokens")


def _files(group: argparse._ArgumentGroup) -> None:
    add, toggle = group.add_argument, argparse.BooleanOptionalAction
    add("--checkpoint", type=Path, help="folder of checkpoints; SIGTERM writes one and exits with 1")
    add("--checkpoint-every", type=int, default=100, help="steps between restorable checkpoints")
    add("--full-every", type=int, default=500, help="steps between those that also hold exportable weights")
    add("--asynchronous", action=toggle, default=False, help="write checkpoints while training goes on")
    add("--resume", action=toggle, default=True, help="continue from the newest complete checkpoint")
    add("--record", type=Path, help="write the JSON record here too")
    add("--profile", action=toggle, default=False, help="add a table of where one step's time goes (GPU)")
    add(
        "--backend-check",
        action=toggle,
        default=True,
        help="profile one microbatch at the end: which attention ran",
    )
    add(
        "--digest",
        action=toggle,
        default=True,
        help="hash all weights at the end (gathers them on every rank)",
    )
