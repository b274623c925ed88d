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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from workloads import device, generated_judge
from workloads import generated_variations as variations
from workloads.generated_judge import Call

# What healthy operators need beyond the judge's units, by benchmarks/generated_profile.py: so many units in a
# type; `noisy`, if rounding inside is rougher than its inputs'; `overflows`, if inner values leave the type;
# `without`, the sizes, numbers or places that it does not take; `left out`, if nothing helps.
PROFILE = Path(__file__).with_name("generated_profile.json")
SAMPLES = 24  # of each operator at most
EXPANDED = 0.2  # the share of cases that have an operand with stride 0 beside what was drawn
TRIED = 6  # samples, until one takes the case's sizes and numbers
# What draws numbers, leaves memory as it is, reads where it is told to, or has several right answers.
NOT_A_FUNCTION = (
    "rand", "bernoulli", "dropout", "multinomial", "normal_", "normal", "cauchy", "exponential",
    "geometric", "log_normal", "uniform", "rrelu", "empty", "new_empty", "sparse", "to_sparse", "item",
    "tolist", "resize", "nn.functional.fractional_max_pool", "nn.functional.max_unpool",
    "nn.functional.ctc_loss", "segment_reduce", "_segment_reduce", "as_strided", "linalg.eig", "linalg.svd",
    "svd",
    "linalg.qr", "qr", "linalg.lstsq", "linalg.l", "lu", "lobpcg", "geqrf", "pinverse", "linalg.pinv",
    "_unsafe", "svd_lowrank", "pca_lowrank", "jiterator", "torch.ops.aten._",
)  # fmt: skip
SIZES = ("", *variations.SIZES)
NUMBERS = ("", *variations.NUMBERS)
# What checks no size before it reads, or needs a matrix of one kind: its samples stay as they are.
EXACT_STRUCTURE = (
    "nn.functional.embedding_bag",
    "nn.functional.multi_head_attention_forward",  # as many scores as its rows squared
    "native_",
    "_native",
    "_batch_norm",
    "_softmax_backward_data",
    "torch.ops.aten",
    "linalg.",
    "cholesky",
    "ormqr",
    "orgqr",
    "triangular_solve",
    "logdet",
    "inverse",
)
MOVES_STATISTICS = ("batch_norm", "instance_norm", "batch_norm_legit", "batch_norm_with_update")
INTEGERS = ("byte", "char", "short", "int", "long")  # beyond their borders a processor may give anything
RARE = ("linalg.", "fft.", "special.", "signal.", "masked.")  # a third of the table, and no part of training


@dataclass(frozen=True)
class Case:
    """A drawn case of an operator; its text repeats it."""

    operator: str
    dtype: str
    sizes: str
    numbers: str
    seed: int

    def __str__(self) -> str:
        changed = " and ".join(one for one in (self.sizes, self.numbers) if one)
        return f"{self.operator} {self.dtype} {changed or 'as it is'} (seed {self.seed})"


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
    drawn = drawn or name in INTEGERS
    left_out = _profile().get(name, {}).get("left out", False)
    return not drawn and not left_out and not getattr(op, "has_nondeterministic_output", False)


@functools.cache
def _profile() -> dict[str, dict[str, Any]]:
    return dict(json.loads(PROFILE.read_text(encoding="utf-8")))


def needed(operator: str, dtype: str) -> float:
    """The units that the profile gives an operator in a type; 0 without."""
    return float(_profile().get(operator, {}).get("units", {}).get(dtype, 0))


@functools.cache
def rows() -> list[tuple[str, str]]:
    """Each operator with each floating type that it has on this device."""
    kind = device().type
    return [
        (name, str(dtype).removeprefix("torch."))
        for name, op in table().items()
        for dtype in generated_judge.FLOATS
        if dtype in op.supported_dtypes(kind) and (kind == "cpu" or not _skipped(op, dtype, "plain"))
    ]


@functools.lru_cache(maxsize=8)
def _order(seed: int, turn: int) -> list[tuple[str, str]]:
    return random.Random(f"operators {seed} turn {turn}").sample(rows(), len(rows()))


@functools.lru_cache(maxsize=4096)
def _decks(row: tuple[str, str], seed: int) -> tuple[list[str], list[str]]:
    """The orders in which a seed takes the sizes and the numbers of a row."""
    source = random.Random(f"{row} {seed}")
    sizes, numbers = ([one for one in every if one not in _without(row[0])] for every in (SIZES, NUMBERS))
    return source.sample(sizes, len(sizes)), source.sample(numbers, len(numbers))


def _without(operator: str) -> list[str]:
    return list(_profile().get(operator, {}).get("without", ()))


def draw(seed: int, number: int) -> Case:
    """One case: every operator and type once before any twice, each time with other sizes and numbers."""
    turn, place = divmod(number, len(rows()))
    row = _order(seed, turn)[place]
    sizes, numbers = _decks(row, seed)
    mixed = hash_of(seed, number)
    return Case(*row, sizes[turn % len(sizes)], numbers[turn % len(numbers)], mixed)


def hash_of(seed: int, number: int) -> int:
    """A seed of one case."""
    return random.Random(f"operators {seed} {number}").randrange(2**31)


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
    kind = device().type
    tests = {ITS_TESTS[what]} if what in ITS_TESTS else set()
    tests |= {ITS_TESTS["plain"]} if kind != "cpu" else set()  # it compares with a processor
    infos = [one for one in op.decorators if hasattr(one, "is_active")]
    return any(one.test_name and one.is_active(*test, kind, dtype, {}) for one in infos for test in tests)


@functools.lru_cache(maxsize=4096)
def _samples(name: str, dtype: torch.dtype) -> list[Any]:
    """PyTorch's samples of an operator that can be judged: the same ones in every run."""
    op = table()[name]
    generated_judge.seed_all(0)
    random.seed(0)
    able = _able(op, dtype)
    samples = itertools.islice(op.sample_inputs_func(op, device(), dtype, requires_grad=able), SAMPLES)
    return [one for one in samples if _is_judged((one.input, one.args, one.kwargs))]


def _is_judged(given: Any) -> bool:
    tensors = [one for one in generated_judge.leaves(given) if isinstance(one, torch.Tensor)]
    return any(one.is_floating_point() for one in tensors) and not any(_odd(one) for one in tensors)


def _odd(one: torch.Tensor) -> bool:
    return one.layout is not torch.strided or one.is_complex() or one.is_quantized or not one.numel()


def forms_of(case: Case) -> list[tuple[str, Call]]:
    """The calls of a case: as drawn, as views, in place, and into a given tensor; none without a sample."""
    op, dtype = table()[case.operator], getattr(torch, case.dtype)
    source = random.Random(case.seed)
    samples = _samples(case.operator, dtype)
    if not samples:
        return []
    base, sample = None, samples[0]
    for sample in source.sample(samples, min(TRIED, len(samples))):
        base = _varied(_call(op, dtype, sample, case.seed), case, source)
        if base is not None:
            break
    if base is None:
        sample = source.choice(samples)
        base = _call(op, dtype, sample, case.seed)
    known = _profile().get(case.operator, {})
    noisy = known.get("noisy", False) or case.operator.startswith(RARE)
    modest = case.numbers not in {"scaled", "uneven", "not finite"} and case.sizes in {"", "odd"}
    inner = dtype is torch.float16 and not modest  # squares and sums leave this type first
    overflows = known.get("overflows", False) or inner
    base = replace(base, noisy=noisy, overflows=overflows, uneven=bool(case.seed % 2))
    base = replace(base, not_finite=case.numbers == "not finite" and case.seed % 4 > 1)
    forms = _forms(op, dtype, base, source, broadcasts=sample.broadcasts_input)
    return [(form, call) for form, call in forms if form not in _without(case.operator)]


def _able(op: Any, dtype: torch.dtype) -> bool:
    return dtype in op.supported_backward_dtypes(device().type) and not _skipped(op, dtype, "gradients")


def _call(op: Any, dtype: torch.dtype, sample: Any, seed: int) -> Call:
    """A sample's call, with copies of its tensors: PyTorch says which of them have gradients."""
    function = functools.partial(_kept, op.op) if op.name.endswith(MOVES_STATISTICS) else op.op
    call = Call(function, (sample.input, *sample.args), sample.kwargs, dtype, _able(op, dtype), seed)
    fixed = frozenset(n for n, one in enumerate(call.tensors()) if not one.requires_grad)
    return replace(call.mapped(_copied), fixed=fixed)


def _kept(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call the function with copies of what it changes: the statistics of a normalization."""
    args, kwargs = generated_judge.mapped(
        (args, kwargs),
        lambda one: one if not isinstance(one, torch.Tensor) or one.requires_grad else one.clone(),
    )
    return function(*args, **kwargs)


def _forms(
    op: Any, dtype: torch.dtype, base: Call, source: random.Random, *, broadcasts: bool
) -> Iterator[tuple[str, Call]]:
    yield "", base
    if not _skipped(op, dtype, "view"):
        yield "as views", variations.in_other_places(base, source)
    if op.inplace_variant and not broadcasts and not _skipped(op, dtype, "in place"):
        yield "in place", replace(base, function=functools.partial(_in_place, op.inplace_variant))
    if op.supports_out and "out" not in base.kwargs and not _skipped(op, dtype, "out"):
        yield "out", replace(base, function=functools.partial(_into, op.op), gradients=False)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _varied(call: Call, case: Case, source: random.Random) -> Call | None:
    """The call with the case's sizes and numbers; `None` if the sample does not take them."""
    if case.operator.startswith(EXACT_STRUCTURE):
        return call
    varied = variations.SIZES[case.sizes](call, source) if case.sizes else call
    if varied is None:
        return None
    if case.numbers:
        varied = variations.NUMBERS[case.numbers](varied, source)
    if varied and source.random() < EXPANDED and "expanded" not in _without(case.operator):
        varied = variations.NUMBERS["expanded"](varied, source)
    return varied


def _in_place(function: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    return function(first.clone(), *args, **kwargs)


def _into(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same call with an `out` tensor that has other strides and holds NaN."""
    wanted = function(*args, **kwargs)
    if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        raise NotImplementedError("not supported: only one result of a floating type has a place here")
    place = torch.full((*wanted.shape, 2), float("nan"), dtype=wanted.dtype, device=wanted.device)[..., 0]
    return function(*args, **kwargs, out=place)
