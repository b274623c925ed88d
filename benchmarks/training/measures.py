"""Measure each kind of published figure on this machine. In: a row, a Bench. Out: a value in the row's unit.

A figure that is a ratio of two jobs runs both, one after the other. A job runs once, however many rows need
it, also where it ran out of memory. What is no measurement of a machine (prices, token budgets) is computed,
or named with the reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import fit
import metrics
from tools import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from rows import Row

OUT_OF_MEMORY = 4
START_S = 400.0  # a start, a preflight, compilation
LEAST_S = 30.0  # no job starts with less than this left: a start alone takes 15 s on a GPU
WARM = 0.4  # of a timed job's seconds


class CannotRunError(RuntimeError):
    """A row cannot run here. `failed`: it should have."""

    def __init__(self, message: str, *, failed: bool = False) -> None:
        super().__init__(message)
        self.failed = failed


@dataclass(frozen=True, kw_only=True)
class Found:
    """A measured figure. `comparable`: its ratio to the published one means something."""

    value: float
    how: str
    comparable: bool = True
    proxy: str | None = None
    records: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """Where and how long jobs run; what they gave so far. `gpu`: the one that jobs see, where several benches
    work side by side. `deadline`: of time.monotonic(), for all jobs.
    """

    machine: fit.Machine
    ranks: int
    tiny: bool
    seconds: float
    more: tuple[str, ...] = ()
    gpu: str | None = None
    limit_s: float = START_S
    deadline: float = math.inf
    ran: dict[tuple[str, ...], dict[str, Any] | launch.RunError] = field(default_factory=dict)
    turns: dict[tuple[str, ...], threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def record(self, flags: tuple[str, ...], ranks: int) -> dict[str, Any]:
        """The record of this job, run now or before. Raises launch.RunError."""
        name = (str(ranks), *flags)
        with self.turns[name]:  # another GPU may run the same job for another row
            if name not in self.ran:
                self.ran[name] = self._run(flags, ranks)
            found = self.ran[name]
        if isinstance(found, launch.RunError):
            raise found
        return found

    def _run(self, flags: tuple[str, ...], ranks: int) -> dict[str, Any] | launch.RunError:
        """The record with the name of its job, or the error of a job that does not fit."""
        left = self.deadline - time.monotonic()
        if left < LEAST_S:
            raise CannotRunError(f"no time is left to start it: {max(left, 0):.0f} s", failed=True)
        here = launch.on_gpu(launch.System("here", launch.torchrun(ranks)), self.gpu)
        try:
            record = launch.run(
                here, [*flags, *self._timing(), *self.more], timeout_s=min(self.seconds + self.limit_s, left)
            )
        except launch.RunError as error:
            if out_of_memory(error):
                return error
            raise
        return {**record, "job": [str(ranks), *flags]}

    def _timing(self) -> list[str]:
        """Flags that bound the run: a few steps on a CPU, seconds on a GPU."""
        if self.tiny:
            return ["--steps", "4", "--warmup", "1", "--no-digest", "--no-preflight", "--device", "cpu"]
        warm = [str(WARM * self.seconds)]
        timed = [str((1 - WARM) * self.seconds)]
        timing = ["--steps", "1000", "--warmup", "2", "--warmup-s", *warm, "--timed-s", *timed]
        return [*timing, "--no-digest", "--lr", "3e-5"]


def out_of_memory(error: launch.RunError) -> bool:
    """Whether a smaller job may run. NCCL and cuBLAS say it in words, without torch's error."""
    return error.code == OUT_OF_MEMORY or (error.code is not None and "out of memory" in str(error).lower())


def measure(row: Row, bench: Bench) -> Found:
    """The row's figure here. Raises CannotRunError."""
    computed = COMPUTED.get(row.metric)
    if computed is not None and row.tokens_per_s is not None:
        return computed(row)
    if row.metric not in MEASURED:
        raise CannotRunError(NOT_MEASURED.get(row.metric, "not a measurement of a machine"))
    against = fit.reason_against(row, bench.machine)
    if against:
        raise CannotRunError(against)
    if not bench.tiny and bench.machine.is_cpu:
        raise CannotRunError("a CPU cannot run it in time; --tiny runs its command on a tiny model")
    return MEASURED[row.metric](row, bench)


def best(
    row: Row, bench: Bench, *more: str, ranks: int | None = None, microbatches: int | None = None
) -> tuple[fit.Variant, dict[str, Any]]:
    """The first variant that runs, with its record.

    `more`: flags of this side of a comparison. `microbatches`: of a step on all ranks, in place of the row's.
    """
    count = ranks or bench.ranks
    for found in fit.variants(row, bench.machine, count, tiny=bench.tiny):
        batch = ("--global-batch", str(found.micro_batch * microbatches)) if microbatches else ()
        variant = replace(found, flags=(*found.flags, *batch))
        record = _tried(bench, (*variant.flags, *more), count)
        if record is not None:
            return variant, sound(record)
    raise CannotRunError(f"does not fit: {fit.arithmetic(row, bench.machine, count)}")


def exactly(bench: Bench, flags: tuple[str, ...]) -> dict[str, Any]:
    """The record of this job and of no smaller one: the other side of its comparison is there."""
    record = _tried(bench, flags, bench.ranks)
    if record is None:
        raise CannotRunError(f"out of memory: {fit.shown(flags)}", failed=True)
    return sound(record)


def _tried(bench: Bench, flags: tuple[str, ...], ranks: int) -> dict[str, Any] | None:
    """The record, or None where the job ran out of memory: then a smaller variant is next."""
    try:
        return bench.record(flags, ranks)
    except launch.RunError as error:
        if out_of_memory(error):
            return None
        raise CannotRunError(f"{fit.shown(flags)}: {error}", failed=True) from error


def sound(record: dict[str, Any]) -> dict[str, Any]:
    """The record, if its numbers count."""
    if record["problems"] or record["performance"] is None:
        raise CannotRunError(f"{record['problems'] or 'no step was timed'}", failed=True)
    return record


def rate(record: dict[str, Any]) -> float:
    """Tokens or images per second and GPU."""
    speed = record["performance"]
    return float(speed[f"{speed['unit']}_per_s_per_gpu"])


def _value(key: str) -> Callable[[Row, Bench], Found]:
    def of(row: Row, bench: Bench) -> Found:
        variant, record = best(row, bench)
        value, how = record["performance"][key], _how(row, variant, record)
        if row.device_unit == "card":
            how += "; published for a card, which torch counts as two devices"
        return Found(value=value, how=how, comparable=not bench.tiny, proxy=variant.proxy, records=[record])

    return of


def _share(row: Row, bench: Bench) -> Found:
    variant, record = best(row, bench)
    peak = record["device"]["bf16"]
    if not peak:
        raise CannotRunError(f"{bench.machine.model} has no peak to compare with")
    value = 100 * record["performance"]["tflops_hardware"] / peak
    return Found(value=value, how=_how(row, variant, record), comparable=not bench.tiny, records=[record])


def _ab(row: Row, bench: Bench, with_it: tuple[str, ...], without: tuple[str, ...], what: str) -> Found:
    """The rate of one side over that of the other; both are the same variant."""
    variant, other = best(row, bench, *without)
    one = exactly(bench, (*variant.flags, *with_it))
    gain = rate(one) / rate(other)
    value = 100 * (gain - 1) if row.unit == "%" else gain
    how = f"{_how(row, variant, one)}; {what}"
    return Found(value=value, how=how, comparable=not bench.tiny, records=[one, other])


def _attention(row: Row, bench: Bench) -> Found:
    if bench.machine.is_cpu:
        raise CannotRunError("a CPU has no fused attention to switch off")
    return _ab(row, bench, ("--attention", "flash"), ("--attention", "math"), "flash over plain attention")


def _compile(row: Row, bench: Bench) -> Found:
    plain = replace(row, flags=(*row.flags, "--implementation", "native"))  # the fused layer compiles nothing
    return _ab(plain, bench, ("--compile",), ("--no-compile",), "compiled over not compiled")


def _model_parallel(flag: str) -> Callable[[Row, Bench], Found]:
    def of(row: Row, bench: Bench) -> Found:
        if bench.ranks % 2:
            raise CannotRunError(f"{flag} 2 needs two GPUs, this run has {bench.ranks}")
        # A pipeline needs two microbatches for each stage; both sides do the same work a step.
        alone = _alone(row)
        if flag == "--pp" and not bench.tiny and _layers(alone, bench) < 2:
            raise CannotRunError("--pp 2 needs two layers, and only one fits without it")
        variant, without = best(alone, bench, microbatches=2 * bench.ranks)
        record = exactly(bench, (*variant.flags, flag, "2"))
        how = f"{_how(row, variant, record)}; {flag} 2 over none, tokens/s"
        return Found(value=rate(record) / rate(without), how=how, comparable=False, records=[record, without])

    return of


def _layers(row: Row, bench: Bench) -> int:
    """Layers of the first variant that fits; 2 where none does: `best` then says why."""
    first = next(fit.variants(row, bench.machine, bench.ranks), None)
    return fit.layers(list(first.flags)) if first else 2


def _alone(row: Row) -> Row:
    """The row's job without model parallel, and without its global batch."""
    words = list(row.flags)
    for name in ("--tp", "--pp", "--global-batch"):
        if name in words:
            at = words.index(name)
            del words[at : at + 2]
    return replace(row, flags=tuple(words), global_batch=None)


def _scaling(row: Row, bench: Bench) -> Found:
    """The rate of a GPU in all of them, as a share of the rate of one alone: weak at the same work a GPU,
    strong at the same work a step.
    """
    if bench.ranks < 2:
        raise CannotRunError("scaling needs two GPUs or more")
    strong = max(fit.ACCUMULATE, bench.ranks) if row.metric == "strong_scaling" else None
    variant, one = best(_alone(row), bench, ranks=1, microbatches=strong)
    many = exactly(bench, variant.flags)
    work = f"{strong} microbatches a step" if strong else "the same work a GPU"
    how = f"{_how(row, variant, many)}; {bench.ranks} over 1, {work}"
    return Found(value=100 * rate(many) / rate(one), how=how, comparable=not bench.tiny, records=[many, one])


def _cost(row: Row) -> Found:
    assert row.tokens_per_s is not None
    assert row.dollars_per_hour is not None
    value = metrics.cost(row.tokens_per_s, row.dollars_per_hour)["dollars_per_1t_tokens"]
    return Found(
        value=value, how=f"computed: {row.tokens_per_s:g} tokens/s at ${row.dollars_per_hour:g} an hour"
    )


def _how(row: Row, variant: fit.Variant, record: dict[str, Any]) -> str:
    devices = f"{record['world_size']} x {record['device']['model']}"
    published = fit.published_split(row)
    of = f" (published: {published})" if published else ""
    return f"{devices}; {variant.how}; {_layout(record)}{of}, {record['options']['implementation']}"


def _layout(record: dict[str, Any]) -> str:
    """The layout, with the ranks of each axis where the model is split."""
    ran = record["layout"]
    split = f" TP {ran['tensor']} x PP {ran['pipeline']} x DP {ran['data']}"
    return f"{ran['parallel']}{split if ran['tensor'] * ran['pipeline'] > 1 else ''}"


MEASURED: dict[str, Callable[[Row, Bench], Found]] = {
    "tflops_noncausal": _value("tflops_noncausal"),
    "tflops_hardware": _value("tflops_hardware"),
    "images_per_s": _value("images_per_s_per_gpu"),
    "peak_share_hardware": _share,
    "attention_gain": _attention,
    "compile_ratio": _compile,
    "tensor_parallel_ratio": _model_parallel("--tp"),
    "pipeline_parallel_ratio": _model_parallel("--pp"),
    "weak_scaling": _scaling,
    "strong_scaling": _scaling,
}
COMPUTED: dict[str, Callable[[Row], Found]] = {"dollars_per_1t_tokens": _cost}
_RECORDS = "a ratio of two systems: ratio.py compares their records"
NOT_MEASURED = {
    "speed_ratio": _RECORDS,
    "speed_ratio_one_head": _RECORDS,
    "stack_ratio": "a ratio of two stacks on one GPU: ratio.py compares their records",
    "accuracy": "billions of tokens: convergence.py runs a short version, tools/evaluate.py its tasks",
    "mean_accuracy": "as its seven tasks",
    "batches": "the length of a job, not a measurement of a machine",
    "steps": "the length of a job, not a measurement of a machine",
    "tokens": "the length of a job, not a measurement of a machine",
    "dollars_per_hour": "a price; cost.py takes it for a record's cost per token",
    "spot_dollars_per_hour": "a price; cost.py takes it for a record's cost per token",
    "estimated_tokens_per_s": "an estimate of no named model: nothing to compare a run with",
    "seconds": "what a provider grants; tests/trainers/test_restart.py kills jobs without any notice",
    "peak_tflops": "a data sheet: tests/acceptance/devices.json",
    "memory_gb": "a data sheet: tests/acceptance/devices.json",
    "memory_gb_per_s": "a data sheet: tests/acceptance/devices.json",
    "power_w": "a data sheet: tests/acceptance/devices.json",
    "parameters": "a size: tests/trainers/test_peaks.py holds ours to it",
    "active_parameters": "a size: tests/trainers/test_peaks.py holds ours to it",
    "tensor_parallel_ranks": "a rule, which --tp follows: its ranks are neighbours on one node",
}
