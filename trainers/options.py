"""The command line of train.py.

In: flags. Out: one frozen Options, or a refusal of flags that cannot work together.

What each flag means is its help text below; `train.py --help` prints them with their defaults.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal, get_args

import config
import presets
from errors import Parser, RefusedError
from rules import contradiction

LR_WARMUP, FULL_EVERY = 10, 500  # steps
WARMUP = 3  # steps; compilation and the caching allocator settle in them

Implementation = Literal["native", "fused", "transformers"]
Precision = Literal["fp32", "bf16", "fp8", "fp8-rowwise"]
Parallel = Literal["fsdp2", "full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "zero1"]
Storage = Literal["fp32", "bf16"]  # of gradients while they are summed, and of AdamW's moments
CompileScope = Literal["block", "model"]
Attention = Literal["auto", "cudnn", "flash", "efficient", "math", "fa4"]
Recompute = Literal["none", "half", "full"]
Device = Literal["auto", "cpu", "cuda"]
TokenType = Literal["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
NotFinite = Literal["stop", "skip"]
Pack = Literal["concat", "masked"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. None: the preset's value, or what suits the device; see --help."""

    model: str
    size: str
    layers: int | None
    implementation: Implementation
    steps: int
    until: int | None
    warmup: int
    warmup_s: float
    budget_s: float | None
    timed_s: float | None
    seq_len: int | None
    micro_batch: str
    global_batch: int | None
    lr: float | None
    lr_warmup: int
    clip: float
    weight_decay: float
    not_finite: NotFinite
    seed: int
    weights: Path | None
    data: str
    token_type: TokenType | None
    labels: str | None
    validation_data: str | None
    validate_every: int | None
    validation_batches: int
    tokenizer: str | None
    pack: Pack | None
    precision: Precision
    parallel: Parallel
    tp: int
    pp: int
    replicas: int
    reshard: bool
    reduce: Storage
    reduce_each: bool
    moments: Storage
    flat_gradients: bool
    lean: bool
    loss_chunks: int | None
    compile: bool | None
    compile_scope: CompileScope
    attention: Attention
    recompute: Recompute
    device: Device
    deterministic: bool
    prefer_deterministic: bool
    portable: bool
    preflight: bool | None
    phase_limit_s: float
    checkpoint: Path | None
    checkpoint_every: int
    full_every: int
    asynchronous: bool
    resume: bool
    changed: bool
    config: Path | None
    record: Path | None
    progress: Path | None
    tensorboard: Path | None
    wandb: str | None
    log_every: int
    profile: bool
    backend_check: bool
    price_per_hour: float | None
    digest: bool

    @property
    def below_fp32(self) -> bool:
        """Whether matrix products run in fewer than 32 bits."""
        return self.precision != "fp32"

    @property
    def last_step(self) -> int:
        """How many steps are done when this run ends."""
        return self.until or self.steps


def parse(arguments: list[str]) -> Options:
    """The options of these arguments. Exits with 2 and one line when they contradict each other."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.config is not None:
        try:
            given = parser.parse_args([*config.words(given.config, parser), *arguments])
        except RefusedError as error:
            parser.error(str(error))
    # Only a warm-up that was asked for can be wrong: a run of one or two steps is fine, it only has no speed.
    explicit = given.warmup is not None
    if not explicit:
        given.warmup = WARMUP
    if given.lr_warmup is None:
        given.lr_warmup = min(LR_WARMUP, given.steps // 2)
    if given.full_every is None:  # the first checkpoint at FULL_EVERY or behind it
        given.full_every = -(-FULL_EVERY // max(1, given.checkpoint_every)) * given.checkpoint_every
    options = Options(**vars(given))
    problem = contradiction(options) or nothing_to_time(options, explicit=explicit)
    if problem:
        parser.error(problem)
    return options


def nothing_to_time(options: Options, *, explicit: bool) -> str | None:
    """Why no step of this run could be timed: its warm-up is as long as the run."""
    if options.budget_s is not None and options.warmup_s >= options.budget_s:
        return (
            f"--warmup-s {options.warmup_s:g} leaves nothing of --budget-s {options.budget_s:g} to time; "
            f"give a budget above {options.warmup_s:g} s, or a shorter warm-up"
        )
    if explicit and options.warmup >= options.last_step:
        flag = "--until" if options.until else "--steps"
        return (
            f"--warmup {options.warmup} leaves none of {flag} {options.last_step} to be timed; "
            f"give more than {options.warmup} steps, or a warm-up below {options.last_step}"
        )
    return None


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """Defaults in the help text, except None: such a flag's text says itself what happens without it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchrun --nproc-per-node N trainers/train.py",
        description="Train one model end to end and print one JSON record.",
        formatter_class=_Help,
    )
    what, how = parser.add_argument_group("what"), parser.add_argument_group("how")
    _what(what)
    _data(what)
    _how(how)
    _conditions(how)
    _files(parser.add_argument_group("files"))
    missing = {field.name for field in fields(Options)} - {action.dest for action in parser._actions}  # noqa: SLF001
    assert not missing, missing
    return parser


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--model", choices=presets.families(), default="llama", help="model family")
    add("--size", default="tiny", help="size of the family; presets.py lists them; config: that of --weights")
    add("--layers", type=int, help="only this many layers, at full width")
    add(
        "--implementation",
        choices=get_args(Implementation),
        default="native",
        help="native: plain torch; fused: hand-written backward; transformers: the library's model",
    )
    add(
        "--steps",
        type=int,
        default=20,
        help="optimizer steps of the whole job, with those before a resumption",
    )
    add("--until", type=int, help="end after this step; the learning rate still follows --steps")
    add("--warmup", type=int, help=f"steps of this run that are not timed [{WARMUP}]")
    add(
        "--warmup-s",
        type=float,
        default=0.0,
        help="and at least so many seconds that are not timed: a chip reaches its power cap within a minute",
    )
    add("--budget-s", type=float, help="end at the next step after this many seconds")
    add(
        "--timed-s",
        type=float,
        help="end after so many seconds of timed steps, three at least; --warmup-s then begins behind the "
        "first step, so that a long compilation takes nothing from either",
    )
    add("--seq-len", type=int, help="tokens per sequence")
    add(
        "--micro-batch",
        default="preset",
        help="samples per GPU and microbatch: a number, or preset (tools/tune.py searches)",
    )
    add(
        "--global-batch",
        type=int,
        help="samples per step over all GPUs; more than one microbatch per GPU accumulates",
    )
    add("--lr", type=float, help="peak learning rate")
    add(
        "--lr-warmup",
        type=int,
        help="steps of linear warm-up; then a cosine to a tenth of the peak "
        f"[{LR_WARMUP}, at most half of --steps]",
    )
    add("--clip", type=float, default=1.0, help="largest global gradient norm")
    add("--weight-decay", type=float, default=0.0, help="AdamW's, of matrices; norms and biases have none")
    add(
        "--not-finite",
        choices=get_args(NotFinite),
        default="stop",
        help="a step whose gradient norm is NaN or infinite ends the job with exit code 3, or changes no "
        "weight (the host then waits for the device in each step)",
    )
    add("--seed", type=int, default=1, help="seed of weights and data; independent of the number of GPUs")


def _data(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--weights", type=Path, help="start from a model that transformers saved, or a full checkpoint")
    add(
        "--data",
        default="synthetic",
        help="synthetic; text (shipped, 2.5 KB); corpus (50 MB from this machine's packages); or a path: "
        "MosaicML streaming shards, a data set saved by Hugging Face, or .txt, .md, .jsonl",
    )
    add(
        "--token-type",
        choices=get_args(TokenType),
        help="type of a token in shards whose column is raw bytes",
    )
    add(
        "--labels",
        help="column of a Hugging Face data set with each token as a label, -100 where none is learnt; "
        "shorter rows are filled up [every token is one]",
    )
    add("--validation-data", help="as --data, for --validate-every; corpus: what is held out of it")
    add("--validate-every", type=int, help="steps between losses of the validation data, and after the last")
    add("--validation-batches", type=int, default=4, help="global batches of it, each time the same")
    add("--tokenizer", help="tokenizer.json for texts [a token is a byte]")
    add(
        "--pack",
        choices=get_args(Pack),
        help="join rows to full sequences; masked: attention stays inside each document [a row is a sample]",
    )


def _how(group: argparse._ArgumentGroup) -> None:
    add, toggle = group.add_argument, argparse.BooleanOptionalAction
    add("--precision", choices=get_args(Precision), default="fp32", help="bf16 keeps float32 master weights")
    add(
        "--parallel",
        choices=get_args(Parallel),
        default="fsdp2",
        help="layout: how the ranks share parameters and optimizer state",
    )
    add("--tp", type=int, default=1, help="tensor parallel ranks, inside one node")
    add("--pp", type=int, default=1, help="pipeline stages")
    add("--replicas", type=int, default=1, help="HSDP: groups of ranks, each with one whole sharded copy")
    add("--reshard", action=toggle, default=True, help="free gathered weights between forward and backward")
    add("--reduce", choices=get_args(Storage), default="fp32", help="type in which gradients are summed")
    add(
        "--reduce-each",
        action=toggle,
        default=False,
        help="fsdp2: sum and shard the gradients of each microbatch: more traffic, no whole gradients",
    )
    add("--moments", choices=get_args(Storage), default="fp32", help="type of AdamW's moments (zero1)")
    add(
        "--flat-gradients",
        action=toggle,
        default=True,
        help="zero1: copy gradients to one buffer of each block; without it, one rank leaves each where "
        "backward made it: nothing is copied, and none takes memory in forward",
    )
    add(
        "--lean",
        action=toggle,
        default=False,
        help="moe: put tokens in order by gathers alone; flux: turn positions in one pass; the same values",
    )
    add(
        "--loss-chunks",
        type=int,
        help="chunks of the loss; 1 holds all logits at once [on a GPU as many as 8192 rows need, else 1]",
    )
    add("--compile", action=toggle, help="torch.compile [on a GPU]")
    add(
        "--compile-scope",
        choices=get_args(CompileScope),
        default="block",
        help="compile each block, or the whole model",
    )
    add(
        "--attention",
        choices=get_args(Attention),
        default="auto",
        help="attention backend; auto tries cuDNN first on NVIDIA; fa4: FlashAttention 4 (flash-attn-4)",
    )
    add(
        "--recompute",
        choices=get_args(Recompute),
        default="none",
        help="activation checkpointing of no block, every other one, or each",
    )


def _conditions(group: argparse._ArgumentGroup) -> None:
    add, toggle = group.add_argument, argparse.BooleanOptionalAction
    add("--device", choices=get_args(Device), default="auto", help="torch calls ROCm's device cuda too")
    add("--deterministic", action=toggle, default=False, help="refuse kernels that are not deterministic")
    add(
        "--prefer-deterministic",
        action=toggle,
        default=False,
        help="take deterministic kernels where there are any, and refuse none",
    )
    add(
        "--portable",
        action=toggle,
        default=False,
        help="draw weights and synthetic inputs on the CPU: the same on every device",
    )
    add("--preflight", action=toggle, help="measure GEMM, copy and collectives first [on a GPU]")
    add(
        "--phase-limit-s",
        type=float,
        default=600,
        help="a phase or step that takes longer ends the run with every rank's stacks",
    )
    add(
        "--price-per-hour",
        type=float,
        help="price of one GPU in dollars; adds the cost of tokens to the record",
    )


def _files(group: argparse._ArgumentGroup) -> None:
    add, toggle = group.add_argument, argparse.BooleanOptionalAction
    add("--checkpoint", type=Path, help="folder of checkpoints; SIGTERM writes one and exits with 1")
    add("--checkpoint-every", type=int, default=100, help="steps between checkpoints")
    add(
        "--full-every",
        type=int,
        help="steps between checkpoints that also hold whole weights for export "
        f"[the first multiple of --checkpoint-every from {FULL_EVERY} on]",
    )
    add("--asynchronous", action=toggle, default=False, help="write checkpoints while training continues")
    add("--resume", action=toggle, default=True, help="continue from the newest complete checkpoint")
    add(
        "--changed",
        action=toggle,
        default=False,
        help="also if its job had other data, seed, batch or schedule",
    )
    add("--config", type=Path, help="TOML of options, as beside each checkpoint; the command line wins")
    add("--record", type=Path, help="write the JSON record here too")
    add("--progress", type=Path, help="append each line of progress here as JSON")
    add("--tensorboard", type=Path, help="folder in which TensorBoard finds the lines of progress")
    add("--wandb", help="project of Weights & Biases that gets them; WANDB_MODE=offline keeps them here")
    add("--log-every", type=int, default=10, help="steps between lines of progress; 0: none")
    add("--profile", action=toggle, default=False, help="add the kernel times of one step (GPU)")
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
        help="hash all weights at the end (one at a time is whole on each rank)",
    )
