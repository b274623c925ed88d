# ruff: noqa: RUF009, TC003 - a call says the flag of a field, and the types are read when the program runs
"""The command line of train.py.

In: flags. Out: one frozen Options, or a refusal of flags that cannot work together.

What each flag means is its help text below; `train.py --help` prints them with their defaults.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

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


def _flag(default: Any, text: str, **more: Any) -> Any:
    """A field of Options as a flag. `group`: of --help, from this field on; `choices`: of a plain type."""
    return field(metadata={"default": default, "help": text, **more})


@dataclass(frozen=True, kw_only=True)
class Options:
    """One run. None: the preset's value, or what suits the device; see --help."""

    model: str = _flag("llama", "model family", group="what", choices=presets.families())
    size: str = _flag("tiny", "size of the family; presets.py lists them; config: that of --weights")
    layers: int | None = _flag(None, "only this many layers, at full width")
    implementation: Implementation = _flag(
        "native", "native: plain torch; fused: hand-written backward; transformers: the library's model"
    )
    steps: int = _flag(20, "optimizer steps of the whole job, with those before a resumption")
    until: int | None = _flag(None, "end after this step; the learning rate still follows --steps")
    warmup: int = _flag(None, f"steps of this run that are not timed [{WARMUP}]")
    warmup_s: float = _flag(
        0.0, "and at least so many seconds that are not timed: a chip reaches its power cap within a minute"
    )
    budget_s: float | None = _flag(None, "end at the next step after this many seconds")
    timed_s: float | None = _flag(
        None,
        "end after so many seconds of timed steps, three at least; --warmup-s then begins behind the "
        "first step, so that a long compilation takes nothing from either",
    )
    seq_len: int | None = _flag(None, "tokens per sequence")
    micro_batch: str = _flag(
        "preset", "samples per GPU and microbatch: a number, or preset (tools/tune.py searches)"
    )
    global_batch: int | None = _flag(
        None, "samples per step over all GPUs; more than one microbatch per GPU accumulates"
    )
    lr: float | None = _flag(None, "peak learning rate")
    lr_warmup: int = _flag(
        None,
        "steps of linear warm-up; then a cosine to a tenth of the peak "
        f"[{LR_WARMUP}, at most half of --steps]",
    )
    clip: float = _flag(1.0, "largest global gradient norm")
    weight_decay: float = _flag(0.0, "AdamW's, of matrices; norms and biases have none")
    not_finite: NotFinite = _flag(
        "stop",
        "a step whose gradient norm is NaN or infinite ends the job with exit code 3, or changes no "
        "weight (the host then waits for the device in each step)",
    )
    seed: int = _flag(1, "seed of weights and data; independent of the number of GPUs")
    weights: Path | None = _flag(None, "start from a model that transformers saved, or a full checkpoint")
    data: str = _flag(
        "synthetic",
        "synthetic; text (shipped, 2.5 KB); corpus (50 MB from this machine's packages); or a path: "
        "MosaicML streaming shards, a data set saved by Hugging Face, or .txt, .md, .jsonl",
    )
    token_type: TokenType | None = _flag(None, "type of a token in shards whose column is raw bytes")
    labels: str | None = _flag(
        None,
        "column of a Hugging Face data set with each token as a label, -100 where none is learnt; "
        "shorter rows are filled up [every token is one]",
    )
    validation_data: str | None = _flag(
        None, "as --data, for --validate-every; corpus: what is held out of it"
    )
    validate_every: int | None = _flag(
        None, "steps between losses of the validation data, and after the last"
    )
    validation_batches: int = _flag(4, "global batches of it, each time the same")
    tokenizer: str | None = _flag(None, "tokenizer.json for texts [a token is a byte]")
    pack: Pack | None = _flag(
        None,
        "join rows to full sequences; masked: attention stays inside each document [a row is a sample]",
    )
    precision: Precision = _flag("fp32", "bf16 keeps float32 master weights", group="how")
    parallel: Parallel = _flag("fsdp2", "layout: how the ranks share parameters and optimizer state")
    tp: int = _flag(1, "tensor parallel ranks, inside one node")
    pp: int = _flag(1, "pipeline stages")
    replicas: int = _flag(1, "HSDP: groups of ranks, each with one whole sharded copy")
    reshard: bool = _flag(True, "free gathered weights between forward and backward")
    reduce: Storage = _flag("fp32", "type in which gradients are summed")
    reduce_each: bool = _flag(
        False, "fsdp2: sum and shard the gradients of each microbatch: more traffic, no whole gradients"
    )
    moments: Storage = _flag("fp32", "type of AdamW's moments (zero1)")
    flat_gradients: bool = _flag(
        True,
        "zero1: copy gradients to one buffer of each block; without it, one rank leaves each where "
        "backward made it: nothing is copied, and none takes memory in forward",
    )
    lean: bool = _flag(
        False, "moe: put tokens in order by gathers alone; flux: turn positions in one pass; the same values"
    )
    loss_chunks: int | None = _flag(
        None, "chunks of the loss; 1 holds all logits at once [on a GPU as many as 8192 rows need, else 1]"
    )
    compile: bool | None = _flag(None, "torch.compile [on a GPU]")
    compile_scope: CompileScope = _flag("block", "compile each block, or the whole model")
    attention: Attention = _flag(
        "auto", "attention backend; auto tries cuDNN first on NVIDIA; fa4: FlashAttention 4 (flash-attn-4)"
    )
    recompute: Recompute = _flag("none", "activation checkpointing of no block, every other one, or each")
    device: Device = _flag("auto", "torch calls ROCm's device cuda too")
    deterministic: bool = _flag(False, "refuse kernels that are not deterministic")
    prefer_deterministic: bool = _flag(
        False, "take deterministic kernels where there are any, and refuse none"
    )
    portable: bool = _flag(False, "draw weights and synthetic inputs on the CPU: the same on every device")
    preflight: bool | None = _flag(None, "measure GEMM, copy and collectives first [on a GPU]")
    phase_limit_s: float = _flag(
        600, "a phase or step that takes longer ends the run with every rank's stacks"
    )
    price_per_hour: float | None = _flag(
        None, "price of one GPU in dollars; adds the cost of tokens to the record"
    )
    checkpoint: Path | None = _flag(
        None, "folder of checkpoints; SIGTERM writes one and exits with 1", group="files"
    )
    checkpoint_every: int = _flag(100, "steps between checkpoints")
    full_every: int = _flag(
        None,
        "steps between checkpoints that also hold whole weights for export "
        f"[the first multiple of --checkpoint-every from {FULL_EVERY} on]",
    )
    asynchronous: bool = _flag(False, "write checkpoints while training continues")
    resume: bool = _flag(True, "continue from the newest complete checkpoint")
    changed: bool = _flag(False, "also if its job had other data, seed, batch or schedule")
    config: Path | None = _flag(None, "TOML of options, as beside each checkpoint; the command line wins")
    record: Path | None = _flag(None, "write the JSON record here too")
    progress: Path | None = _flag(None, "append each line of progress here as JSON")
    tensorboard: Path | None = _flag(None, "folder in which TensorBoard finds the lines of progress")
    wandb: str | None = _flag(
        None, "project of Weights & Biases that gets them; WANDB_MODE=offline keeps them here"
    )
    log_every: int = _flag(10, "steps between lines of progress; 0: none")
    profile: bool = _flag(False, "add the kernel times of one step (GPU)")
    backend_check: bool = _flag(True, "profile one microbatch at the end: which attention ran")
    digest: bool = _flag(True, "hash all weights at the end (one at a time is whole on each rank)")

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
    """A flag for each field: its type says what the flag takes."""
    parser = Parser(
        prog="torchrun --nproc-per-node N trainers/train.py",
        description="Train one model end to end and print one JSON record.",
        formatter_class=_Help,
    )
    kinds, group = get_type_hints(Options), parser.add_argument_group()
    for option in fields(Options):
        said = dict(option.metadata)
        if "group" in said:
            group = parser.add_argument_group(said.pop("group"))
        kind = kinds[option.name]
        if type(None) in get_args(kind):
            (kind,) = (part for part in get_args(kind) if part is not type(None))
        if kind is bool:
            said["action"] = argparse.BooleanOptionalAction
        elif get_origin(kind) is Literal:
            said["choices"] = get_args(kind)
        else:
            said["type"] = kind
        group.add_argument(f"--{option.name.replace('_', '-')}", **said)
    return parser
