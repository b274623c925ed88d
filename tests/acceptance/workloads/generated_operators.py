"""Generated operators: PyTorch's own table, its types, its samples, and variations.

In: a source of numbers. Out: a case and its call.

The table is `op_db`, which PyTorch's own tests draw from. What they do not promise is not asked here.
"""

import contextlib
import functools
import importlib
import itertools
import os
import random
import sys
import types
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from workloads import (
    device,
    generated_elsewhere,
    generated_inside,
    generated_judge,
    generated_left,
    generated_trees,
)
from workloads import generated_variations as variations
from workloads.generated_judge import Call

CPU = torch.device("cpu")
SAMPLES = 256  # of each operator at most
ALIKE = 2  # of a seed, modulo 4: the gradients that come in have stride 0
EXPANDED = 0.3  # the share of calls that have an operand with stride 0 beside what was drawn
OTHERS = 3  # samples of a case of which the kernels alone are judged
ELSEWHERE = 0.5  # the share of them that are views
ALONE = ("not finite", "another sample", "in place")
TRIED = 6  # samples, until one takes the case's sizes and numbers
# What runs no kernel that can be judged, or needs another device.
NOT_DRAWN = (
    "empty", "new_empty", "sparse.", "to_sparse", "item", "tolist", "resize", "as_strided", "jiterator",
    "torch.ops.aten._efficient", "torch.ops.aten._flash", "signal.windows", "full", "logspace", "allclose",
)  # fmt: skip
# All of its numbers are drawn, so there is no kernel to judge: programs for a compiler alone have it.
DRAWS_ALL = ("rand", "normal", "cauchy", "exponential", "geometric", "log_normal", "uniform")
INTEGERS = ("byte", "char", "short", "int", "long")  # beyond their borders a processor may give anything
# What draws numbers, has several right answers, or reads where it is told to: its samples stay as they are,
# and its kernels alone are judged.
NOT_A_FUNCTION = (
    "bernoulli", "nn.functional.dropout", "nn.functional.alpha_dropout",
    "nn.functional.feature_alpha_dropout", "multinomial", "nn.functional.rrelu",
    "nn.functional.fractional_max_pool", "nn.functional.max_unpool", "nn.functional.ctc_loss",
    "segment_reduce", "_segment_reduce",
    "linalg.eig", "linalg.svd", "svd", "linalg.qr", "qr", "linalg.lstsq", "linalg.l", "lu", "lobpcg",
    "geqrf", "pinverse", "linalg.pinv", "_unsafe", "svd_lowrank", "pca_lowrank",
)  # fmt: skip
# Its operands say where it reads, and with stride 0 its gradient damages memory; or how long it takes: of
# -1e9 - 0.5 polygamma takes 15 s.
READS_BY_NUMBERS = (
    "grid_sampler",
    "nn.functional.grid_sample",
    "polygamma",
    "special.polygamma",
    "special.zeta",
    "special.chebyshev_polynomial",  # as many steps as its degree, an operand
    "special.hermite_polynomial",
    "special.laguerre_polynomial",
    "special.legendre_polynomial",
    "special.shifted_chebyshev_polynomial",
)
# With stride 0 it reads behind its operand.
READS_BEYOND = ("median", "nanmedian", "masked.median")
SIZES = ("", *variations.SIZES)
NUMBERS = ("", *variations.NUMBERS)
# What checks no size before it reads, or needs a matrix of one kind: its samples stay as they are.
EXACT_STRUCTURE = (
    "nn.functional.embedding_bag",
    "nn.functional.multi_head_attention_forward",  # as many scores as its rows squared
    "nn.functional.multilabel_margin_loss",  # as many steps
    "nn.functional.linear_cross_entropy.chunked",  # a step of many kernels for each of a few rows
    "grid_sampler",  # its gradient in 16 bits damages memory
    "nn.functional.grid_sample",
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
NORMALIZES = "norm"  # one kernel does all, and numbers that are nearly equal are one number after it
MOVES_STATISTICS = ("batch_norm", "instance_norm", "batch_norm_legit", "batch_norm_with_update")


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


@contextlib.contextmanager
def settings_stay() -> Iterator[None]:
    """Import PyTorch's tables in the body. They need a package that images lack, and change settings."""
    frozen, argv, variables = torch.backends.flags_frozen(), sys.argv, dict(os.environ)
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    with contextlib.suppress(ImportError):
        absent = importlib.import_module("expecttest")
    sys.modules["expecttest"], sys.argv = absent, argv[:1]
    try:
        yield
    finally:
        sys.argv = argv
        for name in os.environ.keys() - variables.keys():  # a child with others loads torch anew
            del os.environ[name]
        if not frozen:
            torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True


@functools.cache
def table() -> dict[str, Any]:
    """PyTorch's operators by name."""
    with settings_stay():
        from torch.testing._internal.common_methods_invocations import op_db
    named = ((f"{op.name}.{op.variant_test_name}".rstrip("."), op) for op in op_db)
    drawn = [(name, op) for name, op in named if not name.startswith(NOT_DRAWN) and name not in INTEGERS]
    return dict(sorted(drawn, key=lambda pair: pair[0]))


def is_alone(name: str) -> bool:
    """Whether an operator's kernels are judged alone: its result is unknown, or far from float64."""
    random = name.startswith(NOT_A_FUNCTION) or getattr(table()[name], "has_nondeterministic_output", False)
    return random or NORMALIZES in name or name in generated_inside.profile()["operators"]


@functools.cache
def rows() -> list[tuple[str, str]]:
    """Each operator that has kernels to judge, with each floating type that it has on this device."""
    return [row for row in every_row() if not row[0].startswith(DRAWS_ALL)]


@functools.cache
def every_row() -> list[tuple[str, str]]:
    """Each operator of the table with each floating type that it has on this device."""
    kind = device().type
    return [
        (name, str(dtype).removeprefix("torch."))
        for name, op in table().items()
        for dtype in generated_judge.FLOATS
        if dtype in op.supported_dtypes(kind)
    ]


@functools.lru_cache(maxsize=8)
def _order(seed: int, turn: int) -> list[tuple[str, str]]:
    return random.Random(f"operators {seed} turn {turn}").sample(rows(), len(rows()))


@functools.lru_cache(maxsize=4096)
def _decks(row: tuple[str, str], seed: int) -> tuple[list[str], list[str]]:
    """The orders in which a seed takes the sizes and the numbers of a row."""
    source = random.Random(f"{row} {seed}")
    return source.sample(SIZES, len(SIZES)), source.sample(NUMBERS, len(NUMBERS))


def draw(seed: int, number: int) -> Case:
    """One case: every operator and type once before any twice, each time with other sizes and numbers."""
    turn, place = divmod(number, len(rows()))
    row = _order(seed, turn)[place]
    sizes, numbers = _decks(row, seed)
    mixed = hash_of(seed, number)
    return Case(*row, sizes[turn % len(sizes)], numbers[turn % len(numbers)], mixed)


def once(seed: int) -> list[int]:
    """The numbers of a seed's first case of each operator, of whatever type that is."""
    first: dict[str, int] = {}
    for number, (operator, _) in enumerate(_order(seed, 0)):
        first.setdefault(operator, number)
    return list(first.values())


def hash_of(seed: int, number: int) -> int:
    """A seed of one case."""
    return random.Random(f"operators {seed} {number}").randrange(2**31)


# PyTorch's own tests of the same property: where they are switched off, nobody promises it.
ITS_TESTS = {
    "gradients": ("TestBwdGradients", "test_fn_grad"),
    "view": ("TestCommon", "test_noncontiguous_samples"),
    "step": ("TestCommon", "test_noncontiguous_samples"),
    "expanded": ("TestCommon", "test_noncontiguous_samples"),
    "out": ("TestCommon", "test_out"),
    "in place": ("TestCommon", "test_variant_consistency_eager"),
}


def _skipped(op: Any, dtype: torch.dtype, what: str) -> bool:
    infos = [one for one in op.decorators if hasattr(one, "is_active")]
    active = (one for one in infos if one.is_active(*ITS_TESTS[what], device().type, dtype, {}))
    return any(one.test_name for one in active)


@functools.lru_cache(maxsize=4096)
def _samples(name: str, dtype: torch.dtype) -> list[Any]:
    """PyTorch's samples of an operator that can be judged, on the processor: the same ones in every run."""
    op = table()[name]
    generated_judge.seed_all(0)
    random.seed(0)
    able = _able(op, dtype)
    samples = itertools.islice(op.sample_inputs_func(op, CPU, dtype, requires_grad=able), SAMPLES)
    judged = (one for one in samples if _is_judged((one.input, one.args, one.kwargs)))
    return [one for one in judged if not _may_pool_nothing(name, one.kwargs)]


def _may_pool_nothing(name: str, given: Mapping[str, Any]) -> bool:
    """Whether a window may have no element: the place of its maximum, where the gradient goes, is outside.

    It may step over a short row where it begins before or ends behind it. So backward damages memory, on a
    processor too (pytorch#114216 has the forward pass).
    """
    steps, padding = (_numbers(given.get(one, least)) for one, least in (("dilation", 1), ("padding", 0)))
    return "max_pool" in name and max(steps) > 1 and (bool(given.get("ceil_mode")) or max(padding) > 0)


def _numbers(given: Any) -> tuple[int, ...]:
    return (given,) if isinstance(given, int) else tuple(given)


def _is_judged(given: Any) -> bool:
    tensors = [one for one in generated_trees.leaves(given) if isinstance(one, torch.Tensor)]
    return any(one.is_floating_point() for one in tensors) and not any(_odd(one) for one in tensors)


def _odd(one: torch.Tensor) -> bool:
    return one.layout is not torch.strided or one.is_complex() or one.is_quantized or not one.numel()


def forms_of(case: Case) -> list[tuple[str, Call]]:
    """The calls of a case: as drawn, as views, in place, and into a given tensor; none without a sample.

    Of not finite numbers, and of other samples, the kernels alone are judged. All is drawn on the processor.
    """
    op, dtype = table()[case.operator], getattr(torch, case.dtype)
    source = random.Random(case.seed)
    samples = _samples(case.operator, dtype)
    if not samples:
        generated_left.say(generated_left.CALL, "no sample can be judged")
        return []
    base, sample = None, samples[0]
    for sample in source.sample(samples, min(TRIED, len(samples))):
        base = _varied(_call(op, dtype, sample, case.seed), case, source)
        if base is not None:
            break
    if case.sizes or case.numbers:
        words = "no sample takes its sizes and numbers"
        generated_left.say("variation", words if base is None else generated_left.JUDGED)
    if base is None:
        sample = source.choice(samples)
        base = _call(op, dtype, sample, case.seed)
    base = replace(
        base,
        inside=True,
        alone=is_alone(case.operator),
        breaks=case.operator in generated_inside.profile()["broken"],
        overflows=True,  # a kernel says so where one is wrong: squares and sums leave a type first
        uneven=bool(case.seed % 2),
    )
    forms = list(_forms(op, dtype, base, source, broadcasts=sample.broadcasts_input))
    others = [_call(op, dtype, one, case.seed) for one in source.sample(samples, min(OTHERS, len(samples)))]
    given = [replace(_another(call, case, source), inside=True, breaks=base.breaks) for call in others]
    if not _is_exact(case.operator) and not case.operator.startswith(READS_BY_NUMBERS):
        forms.append(("not finite", replace(variations.not_finite(base, source), not_finite=True)))
    if not _skipped(op, dtype, "view"):
        given = [_elsewhere(call, source) for call in given]
        forms = [(form, _elsewhere(call, source) if form == "not finite" else call) for form, call in forms]
    forms += [("another sample", call) for call in given]
    on = generated_elsewhere.place()
    return [(form, replace(call, alone=call.alone or form in ALONE, on=on)) for form, call in forms]


def _another(call: Call, case: Case, source: random.Random) -> Call:
    """Another sample, with sizes and numbers of its own."""
    sizes, numbers = source.choice(SIZES), source.choice(NUMBERS)
    return _varied(call, replace(case, sizes=sizes, numbers=numbers), source) or call


def _elsewhere(call: Call, source: random.Random) -> Call:
    """Half of the calls as views."""
    return variations.in_other_places(call, source) if source.random() < ELSEWHERE else call


def _is_exact(name: str) -> bool:
    return name.startswith((*EXACT_STRUCTURE, *NOT_A_FUNCTION))


def _able(op: Any, dtype: torch.dtype) -> bool:
    unsure = _skipped(op, dtype, "gradients") and not op.name.startswith(NOT_A_FUNCTION)
    return dtype in op.supported_backward_dtypes(device().type) and not unsure


def _call(op: Any, dtype: torch.dtype, sample: Any, seed: int) -> Call:
    """A sample's call, with copies of its tensors: PyTorch says which of them have gradients."""
    function = functools.partial(generated_trees.kept, op.op) if op.name.endswith(MOVES_STATISTICS) else op.op
    call = Call(function, (sample.input, *sample.args), sample.kwargs, dtype, _able(op, dtype), seed)
    call = replace(call, alike=seed % 4 == ALIKE)
    fixed = frozenset(n for n, one in enumerate(call.tensors()) if not one.requires_grad)
    return replace(call.mapped(_copied), fixed=fixed)


def _copied(leaf: Any) -> Any:
    return generated_elsewhere.brought_back(generated_trees.copied(leaf))


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


def _varied(call: Call, case: Case, source: random.Random) -> Call | None:
    """The call with the case's sizes and numbers; `None` if the sample does not take them."""
    if _is_exact(case.operator):
        return call
    varied = variations.SIZES[case.sizes](call, source) if case.sizes else call
    if varied is None:
        return None
    if case.numbers and not case.operator.startswith(READS_BY_NUMBERS):
        varied = variations.NUMBERS[case.numbers](varied, source)
    return varied and _expanded(varied, case, source)


def _expanded(call: Call, case: Case, source: random.Random) -> Call:
    chosen = source.random() < EXPANDED and not case.operator.startswith((*READS_BY_NUMBERS, *READS_BEYOND))
    return variations.expanded(call, source) if chosen else call


def _in_place(function: Callable[..., Any], first: Any, *args: Any, **kwargs: Any) -> Any:
    return function(first.clone(), *args, **kwargs)


def _into(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The same call with an `out` tensor that has other strides and holds NaN."""
    wanted = function(*args, **kwargs)
    if not isinstance(wanted, torch.Tensor) or not wanted.is_floating_point():
        raise NotImplementedError("not supported: only one result of a floating type has a place here")
    place = torch.full((*wanted.shape, 2), float("nan"), dtype=wanted.dtype, device=wanted.device)[..., 0]
    return function(*args, **kwargs, out=place)


def function_of(name: str) -> Callable[..., Any]:
    """An operator's function; of what the table calls with a seed of its own, the plain one.

    Raises `NotImplementedError` where the table has no other name for it.
    """
    op = table()[name]
    if not is_seeded(op.op):
        return cast("Callable[..., Any]", op.op)
    words = op.op.__code__.co_names
    if "torch" not in words:  # `svd_lowrank` and `pca_lowrank` are programs of the table's own
        raise NotImplementedError(f"not supported: {name} has no function without a seed")
    function = functools.reduce(getattr, words[words.index("torch") + 1 :], torch)
    elsewhere = functools.partial(_in_place, function)
    return cast("Callable[..., Any]", elsewhere if words[-1].endswith("_") else function)


def is_seeded(function: Any) -> bool:
    """Whether the table calls a function with a seed of its own."""
    return "wrapper_set_seed" in getattr(getattr(function, "__code__", None), "co_names", ())
