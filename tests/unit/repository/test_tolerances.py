"""Tests of the trainers compare numbers by tests/trainers/agree.py alone, so that no processor makes one red.

Everything else that compares with a tolerance there is refused: a call of torch's, NumPy's, pytest's or
Python's comparisons, a tolerance as an argument, and a norm or a largest difference beside a number.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
TRAINERS = ROOT / "tests" / "trainers"
HELPERS = {"agree.py", "figures.py"}
COMPARISONS = {"allclose", "assert_close", "isclose", "approx", "assert_allclose", "assert_almost_equal"}
TOLERANCES = {"atol", "rtol", "abs_tol", "rel_tol"}
SIZES = {"norm", "vector_norm", "dist"}
LOOSE = {"same_sums", "same_training", "same_loss_in_half", "nearer"}  # weights are never compared by these
WEIGHTS = {"weights", "state_dict", "parameters", "named_parameters"}


def loose(tree: ast.AST) -> Iterator[str]:
    """Each place that compares numbers with a tolerance of its own, or weights with any."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in COMPARISONS:
                yield f"{node.lineno}: {name}"
        elif isinstance(node, ast.alias) and node.name.rpartition(".")[2] in COMPARISONS:
            yield f"{node.lineno}: {node.name}"
        elif isinstance(node, ast.keyword) and node.arg in TOLERANCES:
            yield f"{node.value.lineno}: {node.arg}="
        elif isinstance(node, ast.Compare) and any(map(_is_distance, [node.left, *node.comparators])):
            yield f"{node.lineno}: a distance beside a bound"
        elif isinstance(node, ast.Call) and _called(node) in LOOSE and any(map(_is_weights, node.args)):
            yield f"{node.lineno}: weights by {_called(node)}"


def _called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _is_distance(side: ast.expr) -> bool:
    """A size of a difference: (a - b).norm(), abs(a - b), (a - b).abs().max()."""
    for call in (node for node in ast.walk(side) if isinstance(node, ast.Call)):
        inside = [*call.args, call.func]
        differs = any(
            isinstance(x, ast.BinOp) and isinstance(x.op, ast.Sub) for y in inside for x in ast.walk(y)
        )
        if differs and _called(call) in {*SIZES, "abs", "fabs"}:
            return True
    return False


def _is_weights(argument: ast.expr) -> bool:
    """What a job or a model holds, but for what is made of it: gradients of parameters may be compared."""
    if isinstance(argument, ast.Call):
        return _called(argument) in WEIGHTS
    return isinstance(argument, ast.Attribute) and argument.attr in WEIGHTS


@pytest.mark.parametrize("path", sorted(TRAINERS.glob("*.py")), ids=lambda path: path.stem)
def test_only_the_helpers_have_tolerances(path):
    found = list(loose(ast.parse(path.read_text(encoding="utf-8"))))
    assert path.name in HELPERS or not found, f"{path.name}: {found}; compare by tests/trainers/agree.py"


@pytest.mark.parametrize(
    "text",
    [
        "assert torch.allclose(a, b)",
        "from math import isclose",
        "torch.testing.assert_close(a, b)",
        "assert a == pytest.approx(b)",
        "close = torch.testing.assert_close",
        "check(a, b, atol=1e-6)",
        "assert (a - b).norm() / b.norm() < 1e-3",
        "assert (a - b).abs().max() < limit",
        "assert abs(a - b) < 1e-3",
        "assert 1e-3 > torch.linalg.norm(a - b)",
        "same_sums(job.weights(), other)",
        "same_sums(lean.weights, plain.weights)",
        "agree.same_sums(model.state_dict(), other)",
    ],
)
def test_a_tolerance_of_its_own_is_found(text):
    assert list(loose(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "same_bits(lean.weights, plain.weights)",
        "same_sums(lean.gradients, plain.gradients)",
        "assert losses[-1] < 0.9 * losses[0]",
        "assert gradient.norm() > 0",
        "assert rate == figure(2.0, abs=1)",
    ],
)
def test_other_comparisons_are_left_alone(text):
    assert not list(loose(ast.parse(text)))
