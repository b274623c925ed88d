"""Generated operators: PyTorch's own table, its types, its samples, and variations.

In: a source of numbers. Out: a case and its call.

The table is `op_db`, which PyTorch's own tests draw from. What they do not promise is not asked here.
"""

import contextlib
import functools
import importlib
import itertools
import json
import random
import sys
import types
import unittest
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workloads import device, generated_judge
from workloads.generated_judge import Call

# What healthy operators need beyond the judge's units, by benchmarks/generated_profile.py: so many units;
# `noisy`, if rounding inside is rougher than its inputs'; `overflows`, if inner values leave the type.
PROFILE = Path(__file__).with_name("generated_profile.json")
SAMPLES = 24  # of each operator at most
MOST_ELEMENTS = 2**16
# What draws numbers, leaves memory as it is, reads where it is told to, or has several right answers.
NOT_A_FUNCTION = (
    "rand", "bernoulli", "dropout", "multinomial", "normal_", "normal", "cauchy", "exponential",
    "geometric", "log_normal", "uniform", "rrelu", "empty", "new_empty", "sparse", "to_sparse", "item",
    "tolist", "resize", "nn.functional.fractional_max_pool", "nn.functional.max_unpool",
    "nn.functional.ctc_loss", "segment_reduce", "as_strided", "linalg.eig", "linalg.svd", "svd",
    "linalg.qr", "qr", "linalg.lstsq", "linalg.l", "lu", "lobpcg", "geqrf", "pinverse", "linalg.pinv",
    "_unsafe", "svd_lowrank", "pca_lowrank", "jiterator", "torch.ops.aten._",
)  # fmt: skip
RARE = ("linalg.", "fft.", "special.", "signal.", "masked.")  # a third of the table, and no part of training


@dataclass(frozen=True)
class Case:
    """What is drawn. Its words are what repeats it."""

    operator: str
    dtype: str
    sample: int
    variation: str
    gradients: bool
    seed: int

    def __str__(self) -> str:
        grads = " with gradients" if self.gradients else ""
        return f"{self.operator} {self.dtype} sample {self.sample} {self.variation}{grads} (seed {self.seed})"


@functools.cache
def table() -> dict[str, Any]:
    """PyTorch's operators by name. Their module needs a package that images lack, and changes settings."""
    frozen, argv = torch.backends.flags_frozen(), sys.argv
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        absent = importlib.import_module("expecttest")
    sys.modules["expecttest"], sys.argv = absent, argv[:1]
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    finally:
        sys.argv = argv
        if not frozen:
            torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True
    named = ((f"{op.name}.{op.variant_test_name}".rstrip("."), op) for op in op_db)
    return {name: op for name, op in sorted(named, key=lambda pair: pair[0]) if _is_function(name, op)}


def _is_function(name: str, op: Any) -> bool:
    drawn = any(name.startswith(word) or f".{word}" in name for word in NOT_A_FUNCTION)
    return not drawn and not getattr(op, "has_nondeterministic_output", False)


@functools.cache
def _profile() -> dict[str, dict[str, Any]]:
    return dict(json.loads(PROFILE.read_text(encoding="utf-8")))


def needed(operator: str) -> float:
    """The units that the profile gives an operator; 0 without."""
    return float(_profile().get(operator, {}).get("units", 0))


def draw(source: random.Random, seed: int) -> Case:
    """One case: an operator that has a floating type on this device, and everything else by the source."""
    while True:
        name = source.choice(list(table()))
        if name.startswith(RARE) and source.random() < 0.75:
            continue
        op, kind = table()[name], device().type
        dtypes = [one for one in generated_judge.FLOATS if one in op.supported_dtypes(kind)]
        if not dtypes:
            continue
        dtype = source.choice(dtypes)
        able = dtype in op.supported_backward_dtypes(kind) and not _skipped(op, dtype, "gradients")
        known = [one for one in VARIATIONS if not _skipped(op, dtype, one)]
        if not known:
            continue
        number, variation = source.randrange(SAMPLES), source.choice(known)
        gradients = able and source.random() < 0.6
        return Case(name, str(dtype).removeprefix("torch."), number, variation, gradients, seed)


# PyTorch's own tests of the same property: where they are switched off, nobody promises it.
ITS_TESTS = {
    "plain": ("TestCommon", "test_compare_cpu"),
    "gradients": ("TestBwdGradients", "test_fn_grad"),
    "view": ("TestCommon", "test_noncontiguous_samples"),
    "step": ("TestCommon", "test_noncontiguous_samples"),
    "expanded": ("TestCommon", "test_noncontiguous_samples"),
    "out": ("TestCommon", "test_out"),
    "in place": ("TestCommon", "test_variant_consistency_eager"),
}


def _skipped(op: Any, dtype: torch.dtype, what: str) -> bool:
    tests = {ITS_TESTS["plain"], ITS_TESTS.get(what, ITS_TESTS["plain"])}
    infos = [one for one in op.decorators if hasattr(one, "is_active")]
    return any(
        one.test_name and one.is_active(*test, device().type, dtype, {}) for one in infos for test in tests
    )


def call_of(case: Case) -> Call | None:
    """The case's call; `None` if this sample cannot be varied so."""
    op, dtype = table()[case.operator], getattr(torch, case.dtype)
    if case.variation == "out" and not op.supports_out:
        return None
    torch.manual_seed(case.seed)
    random.seed(case.seed)
    samples = list(itertools.islice(op.sample_inputs(device(), dtype, requires_grad=False), SAMPLES))
    if not samples:
        return None
    sample = samples[case.sample % len(samples)]
    function = op.op
    if case.variation == "in place":
        if (function := op.inplace_variant) is None or sample.broadcasts_input:
            return None
        function = functools.partial(_in_place, function)
    call = Call(function, (sample.input, *sample.args), sample.kwargs, dtype, case.gradients, case.seed)
    known = _profile().get(case.operator, {})
    noisy = known.get("noisy", False) or case.operator.startswith(RARE)
    inner = dtype is torch.float16 and case.variation == "large"  # squares and products leave this type first
    call = replace(call, noisy=noisy, overflows=known.get("overflows", False) or inner)
    tensors = call.tensors()
    if not any(one.is_floating_point() for one in tensors) or any(_odd(one) for one in tensors):
        return None
    return VARIATIONS[case.variation](call, random.Random(case.seed))


def _odd(one: torch.Tensor) -> bool:
    return one.layout is not torch.strided or one.is_complex() or one.is_quantized or not one.numel()


def _in_place(function: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    return function(first.clone(), *args, **kwargs)


def _one(change: Callable[[torch.Tensor, random.Random], torch.Tensor]) -> Callable[..., Call | None]:
    """A variation of one floating operand, of those that have elements."""

    def varied(call: Call, source: random.Random) -> Call | None:
        chosen = source.choice([one for one in call.tensors() if one.is_floating_point()])
        changed = change(chosen, source)
        return None if changed is chosen else call.mapped(lambda leaf: changed if leaf is chosen else leaf)

    return varied


def _view(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Equal numbers, other strides: another order of its dimensions, after a few unused elements."""
    order = list(range(one.dim()))
    source.shuffle(order)
    offset = source.randrange(1, 5)
    whole = torch.full((one.numel() + offset,), float("nan"), dtype=one.dtype, device=one.device)
    shape = [one.shape[n] for n in order]
    view = whole[offset:].view(shape).permute([order.index(n) for n in range(one.dim())])
    return view.copy_(one)


def _step(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Equal numbers, each second or third element of memory."""
    if not one.dim():
        return one
    step = source.choice((2, 3))
    whole = torch.full((*one.shape, step), float("nan"), dtype=one.dtype, device=one.device)
    return whole[..., 0].copy_(one)


def _expanded(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    """One slice for all, with stride 0."""
    wide = [n for n, size in enumerate(one.shape) if size > 1]
    return one.narrow(source.choice(wide), 0, 1).expand(one.shape) if wide else one


def _large(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    return one * 2.0 ** source.randrange(4, 6 if one.dtype is torch.float16 else 16)


def _small(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    return one * 2.0 ** -source.randrange(4, 8 if one.dtype is torch.float16 else 24)


def _zero_row(one: torch.Tensor, source: random.Random) -> torch.Tensor:
    if not one.dim():
        return one
    changed = one.clone()
    changed.select(n := source.randrange(one.dim()), source.randrange(one.shape[n])).zero_()
    return changed


def _repeated(which: int) -> Callable[..., Call | None]:
    """Many rows, or long ones: every operand that has this size there is repeated."""

    def varied(call: Call, source: random.Random) -> Call | None:
        sized = [one for one in call.tensors() if one.dim() > 1]
        if not sized:
            return None
        size = sized[0].shape[which]
        times = source.choice((3, 17, 129, 1025, 4099))
        most = max(one.numel() for one in sized)
        times = min(times, MOST_ELEMENTS // most)

        def change(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2 or leaf.shape[which] != size:
                return leaf
            repeats = [1] * leaf.dim()
            repeats[which] = times
            return leaf.repeat(repeats)

        return call.mapped(change) if times > 1 else None

    return varied


def _holes(call: Call, source: random.Random) -> Call | None:
    masks = [one for one in call.tensors() if one.dtype is torch.bool and one.dim()]
    if not masks:
        return None
    chosen, share = source.choice(masks), source.choice((0.05, 0.5, 0.95))
    kept = torch.rand(chosen.shape, generator=torch.Generator().manual_seed(source.randrange(2**31))) < share
    kept = kept.to(chosen.device)
    return call.mapped(lambda leaf: kept if leaf is chosen else leaf)


def _out(call: Call, _: random.Random) -> Call | None:
    """Into a tensor that was there before, with other strides and NaN in it."""
    if "out" in call.kwargs:
        return None

    def into(*args: Any, **kwargs: Any) -> Any:
        wanted = call.function(*args, **kwargs)
        if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
            raise NotImplementedError("not supported: only one result of a floating type has a place here")
        place = torch.full((*wanted.shape, 2), float("nan"), dtype=wanted.dtype, device=wanted.device)[..., 0]
        return call.function(*args, **kwargs, out=place)

    return replace(call, function=into, gradients=False)


def _same(call: Call, _: random.Random) -> Call | None:
    return call


VARIATIONS: dict[str, Callable[[Call, random.Random], Call | None]] = {
    "plain": _same,
    "view": _one(_view),
    "step": _one(_step),
    "expanded": _one(_expanded),
    "large": _one(_large),
    "small": _one(_small),
    "zero row": _one(_zero_row),
    "many rows": _repeated(0),
    "long rows": _repeated(-1),
    "holes": _holes,
    "out": _out,
    "in place": _same,
}
