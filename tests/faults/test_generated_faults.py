"""Generated cases find faults that were drawn without them: a few in a whole run, and a share of many."""

import ast
import contextlib
import itertools
import operator
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planting import TESTS, Fault

pytest.importorskip("torch", reason="the suites need torch")
import torch

import drawn_attention_faults
import drawn_faults
import generated_power

sys.path.insert(0, str(TESTS / "acceptance"))

from workloads import (
    generated,
    generated_attention,
    generated_draws,
    generated_flex,
    generated_inside,
    generated_judge,
    generated_operators,
    generated_optimizers,
    generated_report,
    generated_sizes,
    generated_trees,
    generated_variations,
    operands,
)
from workloads.generated_attention import Case

HERE = Path(__file__).parent
CHECK = "test_generated.py::test_generated"
ONCE = "test_generated.py::test_generated_once"
TURNS = int(os.environ.get("STACKCHECK_DRAWN_TURNS", "1"))  # cases of each operator and type in one run
NIGHTS = int(os.environ.get("STACKCHECK_DRAWN_NIGHTS", "0"))
DRAWN = int(os.environ.get("STACKCHECK_DRAWN_FAULTS", "60"))
FAULT_SEED = int(os.environ.get("STACKCHECK_DRAWN_SEED", "31"))
LEAST_FOUND = 18  # of 60 by one turn of one run
# Of the first 200 cases a few that multiply, in their gradients too.
MULTIPLY = (
    "[n for n in range(200) if (one := generated_operators.draw(0, n)).dtype == 'float32' "
    "and one.operator in ('acos', 'atanh', 'pow')]"
)


def planted(family: str, *fault: str, stay: bool = False) -> Fault:
    """A fault below PyTorch's operators, in the processes that judge the cases; a few of them are enough.

    Or the same in the check whose cases stay.
    """
    count = 48 if family == "sizes" else 24
    few = {"family": family, "seed": 0, "least": count, "most": count}
    words = f"{few | {'processes': 2}!r} | {{'chosen': {MULTIPLY}}}" if family == "operators" else repr(few)
    return Fault(
        ("in the cases that stay: " if stay else "") + " ".join(fault),
        "test_generated.py::test_each_operator" if stay else f"{CHECK}[{family}]",
        files={"drawn_faults.py": (HERE / "drawn_faults.py").read_text(encoding="utf-8")},
        patches={
            f"workloads.generated:{'of_standard' if stay else 'of_soak'}": "lambda **_: {'least': 0, "
            f"**__import__('drawn_faults').under({fault!r}, check, {words})}}"
        },
        says="units from float64",
        tier="soak",
    )


def compiled(name: str, operator: str, *, another: bool = False, **fault: str) -> Fault:
    """A fault of a compiler, in the processes that judge; the batches of an operator are enough."""
    its = f"[n for n in range(batches(TRACED)) if {operator!r} in dict(rows(Job(0, n, TRACED)))]"
    one = f"dict(seed=0, traced={its}, code=())"
    return Fault(
        name,
        f"{CHECK}[compiled]",
        files={
            "drawn_compiler_faults.py": (HERE / "drawn_compiler_faults.py").read_text(encoding="utf-8"),
        },
        patches={
            "workloads.generated_compiled:SHRINKS": "dict.fromkeys(original, 1)",
            "workloads.generated_compiled:of_soak": "lambda **_: {'least': 0, "
            f"**__import__('drawn_compiler_faults').under({fault!r}, check, {one})}}",
        },
        says="units from float64",
        tier="soak",
        another=another,
    )


def stepped(name: str, form: str, function: str, becomes: str, *, another: bool = False) -> Fault:
    """A fault of a form of optimizers, below their Python."""
    patches = {
        f"torch:{function}": f"lambda *a, **k: {becomes}",
        "workloads.generated:SHRINKS": "1",
        "workloads.generated_optimizers:table": "lambda: "
        f"tuple(row for row in original() if row[2] == {form!r})",
    }
    return Fault(name, f"{ONCE}[optimizers]", patches=patches, says="units from float64", another=another)


FAULTS = (
    stepped(
        "a fused step that leaves long weights as they are",
        "fused",
        "_fused_adamw_",
        "[one.copy_(kept) for one, kept in zip(a[0], [one.clone() for one in a[0]]) "
        "if original(*a, **k) is None and one.numel() > 15]",
    ),
    stepped(
        "lists of three weights that forget the last one",
        "lists",
        "_foreach_addcdiv_",
        "original(*(one[:2] if isinstance(one, (list, tuple)) else one for one in a), **k)",
        another=True,
    ),
    stepped(
        "a fused step that no scaler can leave out",
        "fused",
        "_fused_sgd_",
        "original(*a, **{**k, 'found_inf': None})",
        another=True,
    ),
    Fault(
        "what lies behind 2^18 elements is lost",
        "test_generated.py::test_generated_huge",
        patches={
            "workloads.generated_sizes:lacks": "lambda: None",
            "workloads.generated_sizes:ELEMENT_BORDERS": "original | {'huge': (2**18, 2**19)}",
            "workloads.generated_sizes:BY_ROWS": "original | {'sigmoid': lambda x: x.sigmoid() if "
            "x.numel() < 2**18 else x.sigmoid() * (torch.arange(x.numel()) < 2**18).view(x.shape)}",
            "workloads.generated:PLANS": "original | {'huge': (Plan(1, 1, 0),) * 2}",
            "workloads.generated:SHRINKS": "1",
        },
        says="units from float64",
        tier="soak",
    ),
    planted("operators", "mul", "float32", "an operand with gaps", "its last element is 0"),
    planted("operators", "mul", "float32", "always", "it is off by 4096 roundings", stay=True),
    planted("sizes", "gelu", "float32", "more than 2^16 elements", "its last element is 0"),
    planted(
        "attention", "_scaled_dot_product_flash_attention_for_cpu", "float32", "always", "one column is 0"
    ),
    Fault(
        "a mask in groups of four",
        f"{CHECK}[noise]",
        patches={
            "workloads.generated_noise:noises": "lambda p: {'dropout': original(p)['dropout']._replace(of="
            "lambda y: y * (torch.rand(-(-y.numel() // 4), device=y.device) > p).repeat_interleave(4)"
            "[:y.numel()].view(y.shape).to(y.dtype) / (1 - p))}",
            "workloads.generated_noise:SHRINKS": "1",
            "workloads.generated:PLANS": "original | {'noise': (Plan(6, 6, 0),) * 2}",
        },
        says="its numbers repeat each other",
        tier="soak",
    ),
    compiled("a compiled program that loses a step", "mul", kind="update", target="mul"),
    compiled(
        "a change in place that is lost",
        "slice_scatter",
        kind="update",
        target="slice_scatter",
        another=True,
    ),
    compiled("a backward graph that gets another saved tensor", "mul", kind="saved", another=True),
    compiled("a gradient that a compiler leaves out", "mul", kind="gradient", another=True),
    compiled(
        "a wrong decomposition",
        "softmax",
        kind="decomposition",
        target="_softmax",
        effect="times 1 + 2^-6",
        another=True,
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_planted_fault_is_caught(fault, plant):
    plant(fault)


@pytest.mark.parametrize("name", ["sum", "mean", "linear", "softmax"])
def test_a_long_row_that_loses_a_number_is_seen(name, monkeypatch):
    """Its gate is wider than a short row's, as rounding grows with the row."""
    healthy, x = generated_sizes.BY_ROWS[name], operands.normal(2, 2**18, dtype=torch.float32, seed=3)
    given = {"name": name, "places": None, "gradients": name == "softmax"}
    call = generated_judge.Call(generated_sizes.at_rows, (x,), given, torch.float32, steps=True)
    needed = generated_draws.NEEDED * generated_sizes.more_units(call)
    assert generated._judged(call, needed)[0] <= 1

    def loses(x):
        return healthy(x if x.dtype is torch.float64 else x.masked_fill(x == x.amax(-1, keepdim=True), 0))

    monkeypatch.setitem(generated_sizes.BY_ROWS, name, loses)
    assert generated._judged(call, needed)[0] > 1


@pytest.mark.slow
def test_a_drawn_fault_is_found_and_nothing_else():
    """In one process and in seconds: a fault, and the same cases without it."""
    cases = [("operators", 0, number) for number in range(60)] + [
        ("attention", 0, number) for number in range(4)
    ]
    fault = drawn_faults.Drawn("mul", drawn_faults.TYPES[0], "always", "it is off by 4096 roundings")
    assert not any(generated_power.fails(None, case) for case in cases)
    assert generated_power.found(
        fault, [one for one in cases if generated_power.touched(one, [fault]).struck]
    )


FLEX = Case(
    "flex", "float32", 1, batch=2, kv_heads=2, groups=2, sq=17, sk=33, gqa=True, lse=True, empty=True,
    layouts=("by tokens",) * 3, mask=("or", "i >= j", "j < prefix[b]"), gaps=True,
    scores=("(s / 5.0).tanh() * 5.0", "s + slope[slope_from + h] * (j - i)"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("part", "effect"),
    [
        ("mask", "it is ignored in a tile"),
        ("score_mod", "its gradient is doubled"),
        ("key", "its heads are in turn"),
        ("lse", "it has no gradient"),
    ],
)
def test_a_fault_of_flex_attention_is_found(part, effect):
    fault = drawn_attention_faults.Drawn(part, effect, "always", (16, 0, 1), 1e4)
    assert drawn_attention_faults.finds(fault, FLEX)


class ToZero(ast.NodeTransformer):
    """Remainders and quotients go towards zero, as C's do, and not down."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        named = {ast.Mod: "torch.fmod({}, {})", ast.FloorDiv: "torch.div({}, {}, rounding_mode='trunc')"}
        if type(node.op) not in named:
            return node
        text = named[type(node.op)].format(ast.unparse(node.left), ast.unparse(node.right))
        return ast.parse(text, mode="eval").body


def test_a_mask_whose_quotients_go_to_zero_is_found(monkeypatch):
    """By a few of eight drawn masks; without the fault none fails."""
    attend, found = generated_attention._flex, []

    def attends(q, k, v, read, case):
        tree = ast.parse(generated_flex.text(case.mask), mode="eval")
        return attend(q, k, v, read, replace(case, mask=ast.unparse(ToZero().visit(tree))))

    for number in range(13, 21):
        mask = generated_flex.draw_mask(random.Random(number), 1)
        call = generated_attention.made(replace(FLEX, mask=mask, scores=(), lse=False))
        shares = []
        for function in (attend, attends):
            monkeypatch.setattr(generated_attention, "_flex", function)
            shares.append((generated._judged(call, generated_draws.ATTENTION_NEEDED) or (0,))[0])
        assert shares[0] <= 1
        found += [number] if shares[1] > 1 else []
    assert len(found) >= 3


def test_an_error_of_what_torch_takes_is_a_fault_and_made_smaller(monkeypatch):
    """Its words alone give it again."""
    monkeypatch.setattr("torch.nn.attention.flex_attention.flex_attention", lambda *_, **__: torch.ones(0)[1])
    small = generated._smaller(generated_attention.made(FLEX), 1.0)
    assert small.words.startswith("attention(backend='flex', dtype='float32', seed=1, empty=True)")
    again = eval(f"generated.{small.words.partition('), ')[0]})", {"generated": generated})
    assert again.startswith("inf of its gate: IndexError")


@pytest.mark.parametrize("effect", ["one element is off by 64 roundings", "NaN and infinity are 0"])
def test_a_kernel_is_judged_where_the_result_hides_it(effect):
    """The program's last steps take the fault out of its result."""
    x = torch.linspace(0.5, 2, 64)
    x[5] = torch.nan
    call = generated_judge.Call(lambda one: one.exp().nan_to_num() * 0, (x,), {}, torch.float32, inside=True)
    fault = drawn_faults.Drawn("exp", torch.float32, "always", effect)
    healthy = generated._judged(call, 1.0)
    with fault.mode():
        inside, result = generated._judged(call, 1.0), generated._judged(replace(call, inside=False), 1.0)
    assert healthy
    assert healthy[0] <= 1
    assert result
    assert result[0] <= 1
    assert inside
    assert inside[0] > 1
    assert "its kernel exp float32" in inside[1]


HALF, FLOAT = torch.float16, torch.float32
ATEN = torch.ops.aten
# What float64 says otherwise, by no fault: a type, a kernel, operands, and a fault that is seen in them.
NO_ALARMS = {
    "a count that float16 takes for infinity": (
        HALF, ATEN.div.Tensor, (torch.ones(3), torch.tensor([1, 2, 70_000])), "always", "it is negative",
    ),
    "a number to compare with that float16 takes for 0": (
        HALF, ATEN.ge.Scalar, (torch.tensor([0.0, 1, 1]), 1e-12), "always", "its last element is 0",
    ),
    "a gradient at NaN": (
        FLOAT, ATEN.softshrink_backward.default, (torch.ones(40), torch.full((40,), torch.nan), 0.5),
        "a zero", "it is off by 64 roundings",
    ),
    "a mean of infinity and minus infinity": (
        FLOAT, ATEN.native_layer_norm.default,
        (torch.tensor([[1.0, 2, torch.inf, -torch.inf], [1, 2, 3, 4]]), [4], None, None, 1e-5),
        "always", "its last row is 0",
    ),
    "what a kernel worked with": (
        FLOAT, ATEN._linalg_det.default, (torch.rand(5, 5, generator=torch.Generator().manual_seed(0)).mT,),
        "always", "it is negative",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", NO_ALARMS)
def test_what_float64_says_otherwise_is_no_alarm(what):
    """The same kernel with a fault is one, unless its operands alone say that it cannot be."""
    dtype, kernel, operands, condition, effect = NO_ALARMS[what]
    given = [one.to(dtype) if generated_trees.is_number(one) else one for one in operands]
    name = generated_inside.name_of(kernel)
    fault = drawn_faults.Drawn(name, dtype, condition, effect)
    shares = []
    for mode in (contextlib.nullcontext(), fault.mode()):
        with mode, generated_inside.Inside() as inside:
            kernel(*given)
        shares.append(inside.worst[0] if inside.worst else 0)
    assert shares[0] <= 1
    assert shares[1] > 1 or condition != "always"


@pytest.mark.parametrize(("count", "is_judged"), [([65_536], False), ([65_504], True), ([65_536, 2], True)])
def test_one_integer_beyond_a_half_has_two_right_answers(count, is_judged):
    """A processor divides by it as it is, and by several integers as halves."""
    call = generated_inside._call(ATEN.div.Tensor, (torch.ones(2, dtype=HALF), torch.tensor(count)), {})
    assert (call is not None) is is_judged


DOUBTS = {
    "a count of more ones than a half has": (
        torch.bfloat16, ATEN.histc.default,
        (torch.rand(32_776, generator=torch.Generator().manual_seed(0)) * 20 - 10, 10, -10, 0),
        "one element is NaN",
    ),
    "overflow inside": (
        torch.bfloat16, ATEN.soft_margin_loss.default,
        (torch.tensor([1.0, -294, 2]), torch.tensor([1.0, 400, 1]), 0), "one element is NaN",
    ),
    "a product of numbers whose parts are too large": (
        HALF, ATEN.prod.dim_int, (torch.tensor([[300.0, 300, 2**-8, 2**-8], [1, 2, 3, 4]]), 1),
        "it is off by 64 roundings",
    ),
    "a sum of many equal numbers": (
        FLOAT, ATEN.mean.default, (torch.tensor(7.813012599945068).expand(65_536),), "it is negative",
    ),
    "numbers that cancel": (
        torch.bfloat16, ATEN.native_layer_norm.default, (torch.tensor([8.4375]), [1], None, None, 1e-5),
        "one element is NaN",
    ),
    "places between numbers": (
        FLOAT, ATEN.upsample_linear1d_backward.default,
        (torch.rand(1, 2, 16_385, generator=torch.Generator().manual_seed(1)), [16_385], [1, 2, 777], False),
        "it is negative",
    ),
    "a border of bins": (
        HALF, ATEN.histc.default, (torch.tensor([0.2001, 0.2001, 7.5, 0.2001, -3.3, 1.25]), 100, -10, 10),
        "it is 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", DOUBTS)
def test_what_is_measured_of_a_call_excuses_its_rounding_and_no_fault(what, monkeypatch):
    """Without any profile, so that nothing else excuses it."""
    known = {"units": {}, **{name: [] for name in generated_inside.LISTS}}
    monkeypatch.setattr(generated_inside, "profile", lambda: known)
    dtype, kernel, operands, effect = DOUBTS[what]
    given = [one.to(dtype) if generated_trees.is_number(one) else one for one in operands]
    fault = drawn_faults.Drawn(generated_inside.name_of(kernel), dtype, "always", effect)
    shares = []
    for mode in (contextlib.nullcontext(), fault.mode()):
        with mode, generated_inside.Inside() as inside:
            kernel(*given)
        shares.append(inside.worst[0])
    assert shares[0] <= 1 < shares[1]


def test_a_program_may_have_the_roundings_of_its_steps():
    """The gradient of sinc near 0 is what two large numbers leave; a wrong step is larger than that."""
    x = torch.tensor([2e-7, 0.3, 1.7])
    call = generated_judge.Call(torch.sinc, (x,), {}, FLOAT, gradients=True, inside=True)
    healthy = generated._judged(call, 256.0)
    with drawn_faults.Drawn("cos", FLOAT, "always", "it is off by 4096 roundings").mode():
        wrong = generated._judged(call, 256.0)
    assert healthy[0] <= 1 < wrong[0]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        ("nn.functional.binary_cross_entropy", (torch.linspace(0.1, 0.9, 64), torch.ones(64))),
        ("quantile", (torch.linspace(-1, 1, 65), torch.tensor([0.3, 1.0]))),
    ],
)
@pytest.mark.parametrize("noisy", [False, True])
def test_the_last_number_that_torch_takes_is_judged(function, given, noisy):
    """What says how far a result may be moves numbers, and torch refuses shares beyond 1."""
    healthy = operator.attrgetter(function)(torch)
    call = generated_judge.Call(healthy, given, {}, FLOAT, noisy=noisy)
    wrong = replace(call, function=lambda *given: healthy(*given) * (1 + 2.0**-10), right=call)
    shares = [generated._judged(one, 1.0)[0] for one in (call, wrong)]
    assert shares[0] <= 1 < shares[1]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failure_that_does_not_come_with_other_numbers_is_no_alarm(failing, monkeypatch):
    """A call fails, and with three times other numbers once or twice."""
    answers = iter([(2.0, "wrong")] * failing + [(0.5, "right")] * generated.AGAIN)
    monkeypatch.setattr(generated, "_worst", lambda *_: (2.0, "wrong", 0))
    monkeypatch.setattr(generated, "_judged", lambda *_: next(answers))
    assert (generated.margin("operators", 0, 0) is None) is (failing == 1)


def test_other_numbers_have_the_same_places():
    buffer = torch.arange(24.0)
    given = (buffer.view(4, 6)[1:, ::2], buffer.view(4, 6).t(), buffer[3:4].expand(5), torch.tensor(2.0))
    call = generated_judge.Call(torch.add, given, {}, FLOAT)
    for one, other in zip(given, generated_variations.rescaled(call, random.Random(1)).args, strict=True):
        assert other.stride() == one.stride()
        assert other.storage_offset() == one.storage_offset()
        assert ((other >= one / 2) & (other <= one)).all()
        assert not torch.equal(other, one)


def test_kernels_without_one_answer_are_not_judged():
    """A view, random numbers, empty memory."""
    x = torch.ones(3)
    with generated_inside.Inside() as inside:
        torch.rand_like(x), torch.empty_like(x), x.view(1, 3)
    assert not inside.found


def test_words_that_leave_operators_out_leave_no_others_out():
    """As `int` leaves out no interpolation, and `normal` no normalization."""
    names = {name for name, _ in generated_operators.rows()}
    assert {"nn.functional.interpolate.linear", "nn.functional.normalize", "masked.normalize", "abs"} <= names
    assert not names & {"int", "normal", "rand_like", "full", "sparse.sampled_addmm"}


def test_every_operator_has_a_turn_before_any_has_two():
    rows = generated_operators.rows()
    for seed in (0, 740_000):
        turns = [
            [generated_operators.draw(seed, turn * len(rows) + n) for n in range(len(rows))]
            for turn in (0, 1)
        ]
        for drawn in turns:
            assert {(one.operator, one.dtype) for one in drawn} == set(rows)
        assert [(one.operator, one.dtype) for one in turns[0]] != [
            (one.operator, one.dtype) for one in turns[1]
        ]
        same = {(one.operator, one.dtype): (one.sizes, one.numbers) for one in turns[0]}
        assert all(same[one.operator, one.dtype] != (one.sizes, one.numbers) for one in turns[1])


def test_another_seed_draws_other_cases():
    cases = [[str(generated_operators.draw(seed, n)) for n in range(50)] for seed in (0, 1, 0)]
    assert cases[0] == cases[2]
    assert not set(cases[0]) & set(cases[1])


@pytest.mark.parametrize("family", ["optimisers", "huge", ""])
def test_a_family_that_is_none_is_refused(family):
    with pytest.raises(ValueError, match="expected one of") as refused:
        generated.repeat(family, 0, 1)
    said = str(refused.value).partition("expected one of ")[2].split(", ")
    assert set(said) == set(generated.PLANS) - {"huge"}  # a size of `sizes`


def test_each_optimizer_has_its_turn():
    """With each of its options in each form, in another order in the next turn."""
    table = generated_optimizers.table()
    assert {form for _, _, form in table} == {"one by one", "lists", "fused"}
    turns = [
        [generated_optimizers.draw(generated_draws.source("optimizers", 0, n), 0, n) for n in numbers]
        for numbers in (range(len(table)), range(len(table), 2 * len(table)))
    ]
    named = [[(one.name, one.form) for one in drawn] for drawn in turns]
    assert sorted(named[0]) == sorted(named[1]) == sorted((name, form) for name, _, form in table)
    assert named[0] != named[1]


@pytest.mark.parametrize(("dtype", "overflows"), [(torch.float16, ()), (torch.float32, (0,))], ids=str)
def test_what_is_passed_over_is_there(dtype, overflows, monkeypatch):
    """So this fails when torch has these faults no more. Memory that nobody wrote is NaN here."""
    monkeypatch.setattr(torch, "empty_like", lambda one, **_: torch.full_like(one, torch.nan))
    options, places = {"lr": 1.0, "momentum": 0.5}, ("dense", "dense")
    case = generated_optimizers.Case("SGD", options, "fused", dtype, ((33,),), places, 1, overflows=overflows)
    assert generated_optimizers.known(case)
    said = generated._judged(generated_optimizers.made(case, 0), generated_optimizers.NEEDED)
    assert said[0] > 1


def test_memory_that_nobody_wrote_is_no_rounding():
    """It changes from call to call, as rounding changes with the operands: that excuses nothing."""
    calls = itertools.count()

    def broken(x):
        out = x * 2
        return out if out.dtype is torch.float64 else torch.cat((out[1:], out[:1] * next(calls)))

    x = operands.normal(64, dtype=torch.float32, seed=0)
    call = generated_judge.Call(broken, (x,), {}, torch.float32, steps=True)
    assert generated._judged(call, generated_draws.NEEDED)[0] > 1


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Huge sizes that a processor has memory for: beyond 2^18 and 2^19 elements."""
    monkeypatch.setitem(generated_sizes.ELEMENT_BORDERS, "huge", (2**18, 2**19))
    monkeypatch.setattr(generated, "SHRINKS", 1)
    return {"least": len(generated_sizes.NAMES), "most": len(generated_sizes.NAMES), "sizes": "huge"}


def test_each_function_of_a_huge_size_is_judged(huge):
    report = generated.check("sizes", 0, **huge)
    assert not report["failed"]
    assert report["judged"] >= 0.9 * len(generated_sizes.NAMES)


@pytest.mark.parametrize("name", ["sigmoid", "fused AdamW of three", "sum of all", "histogram"])
def test_what_a_huge_size_loses_is_seen(name, huge, monkeypatch):
    """Behind the first 2^18 elements nothing is written."""
    table = next(one for one in (generated_sizes.BY_ROWS, generated_sizes.OVER_ROWS) if name in one)
    healthy = table[name]

    def loses(x):
        if x.dtype is torch.float64:
            return healthy(x)
        whole = x.flatten().clone()
        whole[2**18 :] = 0
        return healthy(whole.view(x.shape))

    monkeypatch.setitem(table, name, loses)
    chosen = [generated_sizes.NAMES.index(name)]
    assert generated.check("sizes", 0, **huge, chosen=chosen)["failed"]


def test_a_clock_that_is_over_takes_nothing_from_the_least():
    """Neither in one process nor in two, and never more than the most."""
    for processes in (1, 2):
        assert generated.check("sizes", 0, 5, 9, seconds=0, processes=processes)["drawn"] == 5
        assert generated.check("sizes", 0, 2, 4, seconds=1000, processes=processes)["drawn"] == 4


def test_fewer_cases_than_the_least_are_refused():
    report = {"family": "sizes", "seed": 0, "drawn": 4, "least": 5, "judged": 4, "worst": 0.0, "failed": []}
    report["left"] = {"case": {"judged": 4}}
    with pytest.raises(AssertionError, match="only 4 of at least 5"):
        generated_report.require(report, lambda *_, **__: None, 0.5)


ENDS = {
    "os._exit(3)": "it ended its process: exit code 3",
    "lost()": "it ended its device's context: CUDA error: device-side assert triggered",
    "os.kill(os.getpid(), 11)": "it ended its process: SIGSEGV",
    "sum(range(10**15))": "it ended its process: it took over 5 s",
}


@pytest.mark.parametrize(
    "what", [one if "lost" in one else pytest.param(one, marks=pytest.mark.slow) for one in ENDS]
)
def test_a_case_that_ends_its_process_or_does_not_end_is_named(what: str) -> None:
    """What ends a process cannot say who it was, so what started it does, and all other cases are judged."""
    program = (
        "import os; from workloads import generated, generated_elsewhere, generated_processes\n"
        "def lost(): raise generated_elsewhere.DeviceLostError('CUDA error: device-side assert triggered')\n"
        "generated_processes.MOST_S = {'cpu': 5}\n"
        f"generated._one = lambda family, seed, number, sizes: {what} if number in (3, 4) else (0.5, '')\n"
        "print(generated.check('sizes', 7, 30, 30, processes=2))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=TESTS / "acceptance",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = ast.literal_eval(ended.stdout)
    assert [report["drawn"], report["judged"], report["worst"]] == [30, 30, 0.5]
    assert len(report["failed"]) == 2
    for number in (3, 4):
        assert any(
            f"again: generated.repeat('sizes', 7, {number}, 'small')" in one for one in report["failed"]
        )
    assert all(ENDS[what] in one for one in report["failed"])


@pytest.mark.slow
def test_power(tmp_path):
    """How many of the drawn faults one run finds, and how many nights with other seeds find."""
    drawn = list(drawn_faults.faults(FAULT_SEED, DRAWN))
    counts = {"operators": TURNS * len(generated_operators.rows()), "sizes": 16, "attention": 24}
    power = generated_power.measure(drawn, range(1 + NIGHTS), counts, len(os.sched_getaffinity(0)))
    told = [
        f"{fault}: {one.case or 'not found'}, {one.touched} cases run it"
        for fault, one in power.faults.items()
    ]
    one, later = power.within(range(1)), power.within(range(1 + NIGHTS))
    told.append(f"{one} of {len(drawn)} in one run, {later} with {NIGHTS} nights more")
    (tmp_path / "power.txt").write_text("\n".join(told), encoding="utf-8")
    assert one >= LEAST_FOUND * len(drawn) // 60
