"""How a published job can run on this machine. In: a row, the machine. Out: variants to try, the best first.

A variant is of true size, or a proxy of true width with fewer layers, and says so. The order: as published;
with smaller microbatches; in the layout that keeps least state (ZeRO-1 with 16-bit sums and moments; first on
one rank where it has the fused layer); then proxies. What cannot fit by arithmetic (memory.py) is not tried.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

import memory
import options as command_line
import presets

if TYPE_CHECKING:
    from collections.abc import Iterator

    from options import Options
    from rows import Row

# What a job takes above the arithmetic of memory.py. Autograd keeps more of a block than backward must have:
# 1.6 times as much on H200s (tests/trainers/test_memory.py); the fused layer keeps what the arithmetic says.
AUTOGRAD, FUSED = 1.6, 1.05
SPARE, CONTEXT = 1.03, 3.5e9
USABLE = 0.97  # of the device
ACCUMULATE = 4  # microbatches of a step in a timed run, where the document has a larger global batch
PROXIES = (32, 24, 16, 12, 8, 6, 4, 2, 1)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where rows run. `model`: as devices.json spells it; CPU has no limit of memory here."""

    model: str
    count: int
    memory_bytes: float
    fp8: bool

    @property
    def is_cpu(self) -> bool:
        """Whether it has no GPU."""
        return self.model == "CPU"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A job for train.py. `proxy`: None for the true size. `arithmetic`: its memory."""

    flags: tuple[str, ...]
    micro_batch: int
    proxy: str | None
    changed: str
    arithmetic: str = ""

    @property
    def how(self) -> str:
        """True size or proxy, and what differs from the document."""
        size = f"proxy: {self.proxy}" if self.proxy else "true size"
        return "; ".join(part for part in (size, f"batch {self.micro_batch}", self.changed) if part)


def reason_against(row: Row, machine: Machine) -> str | None:
    """Why no variant of this row can run here; None if one may."""
    if not row.flags:
        return "the document names no job for it"
    if row.precision == "fp8" and not machine.fp8:
        return f"{machine.model} has no FP8"
    if "FOLDER" in row.flags:
        return "it needs the document's own data and tokens: see docs/guides/training-jobs.md"
    return None


def variants(row: Row, machine: Machine, ranks: int, *, tiny: bool = False) -> Iterator[Variant]:
    """What to try, the best first; nothing where no variant fits."""
    if tiny:
        yield _tiny(row, ranks)
        return
    base = _shared(row, ranks)
    batches = _batches(row, base)
    lean = _lean(row, base)
    whole = [(base, ""), (lean, "ZeRO-1, 16-bit sums and moments")][: 1 if lean == base else 2]
    if ranks == 1 and "fused" in lean:  # one rank shards nothing: a published layout is only in the way
        whole.reverse()
    for flags, changed in whole:
        yield from _fitting(row, flags, machine, ranks, batches=batches, changed=changed)
    for fewer in PROXIES:
        if fewer < layers(base):
            flags = [*base, "--layers", str(fewer)]
            proxy = f"{fewer} layers of true width"
            yield from _fitting(row, flags, machine, ranks, batches=batches, proxy=proxy)


def arithmetic(row: Row, machine: Machine, ranks: int) -> str:
    """The sum for the smallest true-size variant, for a row that does not fit."""
    flags = _shared(row, ranks)
    parsed, preset = _parsed(flags)
    found = memory.need(parsed, preset, ranks=ranks, micro_batch=1)
    return f"batch 1 on {ranks} needs at least {found}, a device has {machine.memory_bytes / 1e9:.1f} GB"


def _fitting(
    row: Row,
    flags: list[str],
    machine: Machine,
    ranks: int,
    *,
    batches: list[int],
    changed: str = "",
    proxy: str | None = None,
) -> Iterator[Variant]:
    parsed, preset = _parsed(flags)
    for samples in batches:
        found = memory.need(parsed, preset, ranks=ranks, micro_batch=samples)
        # On the machine of the document the published size is tried, even if it fits by a hair.
        as_published = (row.device, row.count) == (machine.model, ranks)
        room = machine.memory_bytes if as_published else USABLE * machine.memory_bytes
        steps = _global_batch(row, samples, ranks // (parsed.tp * parsed.pp), parsed.pp)
        wanted = found.least if as_published else planned(found, parsed, accumulated=bool(steps))
        if wanted > room:
            continue
        given = (*flags, "--micro-batch", str(samples), *steps)
        yield Variant(flags=given, micro_batch=samples, proxy=proxy, changed=changed, arithmetic=str(found))


def planned(need: memory.Need, options: Options, *, accumulated: bool = False) -> float:
    """Bytes that a job will take. FSDP's gradients grow while backward frees activations, but those of the
    microbatches before are there already.
    """
    activations = need.activations * (FUSED if options.implementation == "fused" else AUTOGRAD)
    growing = (
        activations + need.gradients
        if need.gradients_stay or accumulated
        else max(activations, need.gradients)
    )
    return SPARE * (need.state + need.gathered + need.logits + growing) + CONTEXT


def _shared(row: Row, ranks: int) -> list[str]:
    """The published flags, with as much of --tp and --pp as there are ranks."""
    words = list(row.flags)
    for name in ("--global-batch", "--steps", "--checkpoint", "--checkpoint-every", "--full-every"):
        words = _without(words, name)
    words = [*_without(_without(words, "--tp"), "--pp"), *_split(row, ranks)]
    precision = {"fp16": "bf16"}.get(row.precision or "", row.precision)
    words += ["--precision", precision] if precision and "--precision" not in words else []
    return words + (["--seq-len", str(row.seq_len)] if row.seq_len and "--seq-len" not in words else [])


def _split(row: Row, ranks: int, most: int = 0) -> list[str]:
    """--tp and --pp as published, or the largest divisors of them that so many ranks and `most` allow."""
    given, words = _parsed(list(row.flags))[0], []
    for name, wanted in (("--tp", given.tp), ("--pp", given.pp)):
        kept = math.gcd(wanted, ranks, most)
        words += [name, str(kept)] if kept > 1 else []
        ranks //= kept
    return words


def published_split(row: Row) -> str:
    """The row's tensor and pipeline ranks; empty where a rank held the whole model."""
    given = _parsed(list(row.flags))[0]
    return f"TP {given.tp} x PP {given.pp}" if given.tp * given.pp > 1 else ""


def _lean(row: Row, flags: list[str]) -> list[str]:
    """The same job in ZeRO-1, with the fused layer where there is one."""
    words = _without(flags, "--parallel")
    parsed = _parsed(words)[0]
    fused = (
        parsed.model in {"llama", "mistral"}
        and parsed.precision in {"bf16", "fp8"}
        and parsed.recompute == "none"
    )
    fused = fused and parsed.tp * parsed.pp == 1 and "--implementation" not in flags
    if row.precision == "fp8" and not fused:
        return flags
    words = [*words, "--parallel", "zero1", "--reduce", "bf16", "--moments", "bf16"]
    return [*words, "--implementation", "fused"] if fused else words


def _global_batch(row: Row, samples: int, data_ranks: int, stages: int) -> list[str]:
    """Some microbatches a step where the document accumulates; a pipeline needs two for each stage."""
    wanted = row.global_batch or 1
    count = max(1, min(ACCUMULATE, wanted // (samples * max(1, data_ranks))), 2 * stages if stages > 1 else 1)
    return ["--global-batch", str(samples * max(1, data_ranks) * count)] if count > 1 else []


def _batches(row: Row, flags: list[str]) -> list[int]:
    """The published microbatch, or the preset's, then smaller ones."""
    first = row.micro_batch or _parsed(flags)[1].micro_batch
    found = [first]
    while found[-1] > 1:
        found.append(max(4, found[-1] // 2) if found[-1] > 4 else found[-1] - 1)
    return found


def _tiny(row: Row, ranks: int) -> Variant:
    """The family's tiny model: shows that the row's command runs, and nothing of its speed."""
    parsed = _parsed(list(row.flags))[0]
    flags = ["--model", parsed.model, "--size", "tiny", "--parallel", parsed.parallel, "--micro-batch", "2"]
    split = _parsed(flags + _split(row, ranks, most=2))[0]  # it has two layers
    flags += [*_split(row, ranks, most=2), *_global_batch(row, 2, ranks // (split.tp * split.pp), split.pp)]
    flags += ["--precision", "bf16"] if row.precision else []
    return Variant(flags=tuple(flags), micro_batch=2, proxy="tiny: not comparable", changed="")


def layers(flags: list[str]) -> int:
    """Layers of the model that these flags train; 0 where it has two kinds of blocks."""
    return int(getattr(_parsed(flags)[1].config, "layers", 0))


def _parsed(flags: list[str]) -> tuple[Options, presets.Preset]:
    parsed = command_line.parse(flags)
    return parsed, presets.find(parsed.model, parsed.size, layers=parsed.layers)


def _without(words: list[str], name: str) -> list[str]:
    """The flags without this one and its value."""
    if name not in words:
        return words
    at = words.index(name)
    return words[:at] + words[at + 2 :]


def shown(flags: tuple[str, ...]) -> str:
    """The flags as a shell line."""
    return shlex.join(flags)
