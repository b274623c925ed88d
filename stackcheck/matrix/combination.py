"""Cell -> combination (axis -> value), with the values that the rules decide; and its judgements.

In: a `Cell`, the vendor of its runtime, its packages, the rules. Out: its combination; its judgements.
Triton, the collective library and FlashAttention's form are not chosen by hand: the rules name them. Pure.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import cache

from stackcheck.matrix.expand import Cell
from stackcheck.matrix.matrix import Matrix, StackSettings, TestTarget
from stackcheck.matrix.rules import Rule, RuleFinding, RuleJudgement, RuleSet
from stackcheck.vendors import Vendor

# Packages of the matrix whose versions the rules judge.
JUDGED_PACKAGES = ("torchao", "transformers", "amdsmi")
# What torch pins and the matrix may choose another version of: each is a package of its own.
REPLACEABLE = ("nccl", "triton")
COLLECTIVES: Mapping[str, str] = {"amd": "rccl", "nvidia": "nccl"}


def judge_cell(
    values: Mapping[str, str], archs: Iterable[str], targets: Iterable[TestTarget], rules: RuleSet
) -> tuple[RuleJudgement, ...]:
    """A judgement of the combination, and one for each of its architectures and each driver of its tests."""
    undecided = tuple(RuleFinding(rule=rule, holds=False) for rule in _undecided(values))
    return (
        rules.judge(values),
        RuleJudgement(combination=values, findings=undecided),
        *(rules.judge(asked, about=axis) for axis, asked in _narrowed(values, archs, targets)),
    )


def broken_by_cell(
    values: Mapping[str, str], archs: Iterable[str], targets: Iterable[TestTarget], rules: RuleSet
) -> dict[str, Rule]:
    """The rules that are broken in `judge_cell`, by id."""
    broken = [*rules.broken(values), *_undecided(values)]
    for axis, asked in _narrowed(values, archs, targets):
        broken += rules.broken(asked, about=axis)
    return {rule.id: rule for rule in broken}


def _narrowed(
    values: Mapping[str, str], archs: Iterable[str], targets: Iterable[TestTarget]
) -> Iterator[tuple[str, Mapping[str, str]]]:
    """The combination with each architecture, and with each driver; and the axis that is new in it."""
    for arch in archs:
        yield "arch", {**values, "arch": arch}
    for driver in sorted({target.driver for target in targets if target.driver}):
        yield "driver", {**values, "driver": driver}


def _undecided(values: Mapping[str, str]) -> list[Rule]:
    """Libraries that torch needs on a GPU and no table names: they would be loaded without any check."""
    collective = COLLECTIVES.get(values["vendor"])
    if "torch" not in values or collective is None:
        return []
    return [_decided(axis) for axis in ("triton", collective) if axis not in values]


@cache
def _decided(axis: str) -> Rule:
    return Rule(
        id=f"R0-decided[{axis}]",
        when={"torch": ("*",)},
        require={axis: ("*",)},
        because=f"no source states which {axis} goes with it: add a row to its table",
        source="[tables] images/compat.yaml",
        unknown=True,
    )


def combination(cell: Cell, vendor: Vendor, packages: Mapping[str, str], rules: RuleSet) -> dict[str, str]:
    """The cell as axis -> value, with what the rules decide filled in."""
    return complete(chosen(cell, vendor, packages), rules)


def replaced(values: Mapping[str, str], cell: Cell, rules: RuleSet) -> dict[str, str]:
    """What torch pins where the matrix chose another version, axis -> torch's own version."""
    picked = [axis for axis in REPLACEABLE if getattr(cell, axis)]
    own = complete({axis: value for axis, value in values.items() if axis not in picked}, rules)
    return {axis: own[axis] for axis in picked if own.get(axis, values[axis]) != values[axis]}


def packages_of(cell: Cell, settings: StackSettings, found: Matrix) -> dict[str, str]:
    """Every package that the matrix pins in a cell's images, name -> version."""
    training = found.training_packages if cell.torch else {}
    runtime = found.runtimes[cell.runtime].packages
    return {**found.packages, **training, **runtime, **(settings.packages or {})}


def chosen(cell: Cell, vendor: Vendor, packages: Mapping[str, str]) -> dict[str, str]:
    """The values that the matrix gives a cell, axis -> value."""
    values = {
        "vendor": vendor,
        cell.runtime: cell.version,
        "torch": cell.torch,
        "python": cell.python,
        "os": cell.os,
        "wheels": cell.wheels if cell.torch else None,
        "flash_attn": cell.flash_attn,
        **{axis: getattr(cell, axis) for axis in REPLACEABLE},
        **{name: packages.get(name) for name in JUDGED_PACKAGES},
    }
    return {axis: value for axis, value in values.items() if value is not None}


def complete(known: Mapping[str, str], rules: RuleSet) -> dict[str, str]:
    """A combination with what the rules decide: Triton, collectives, FlashAttention, layout, devices."""
    values = dict(known)
    collective = COLLECTIVES.get(values.get("vendor", ""))
    with_torch = ["triton", "triton_package", *([collective] if collective else []), "cxx11abi"]
    for axis in ("layout", "device_wheels", *(with_torch if "torch" in values else ())):
        if axis not in values and (value := rules.derive(values, axis)):
            values[axis] = value
    if "flash_attn" in values and "flash_attn_from" not in values:
        values["flash_attn_from"] = _flash_attn_from(values, rules)
    return values


def _flash_attn_from(values: Mapping[str, str], rules: RuleSet) -> str:
    """Where FlashAttention comes from: the first form that no rule refuses; it can always be compiled."""
    for form in ("wheel", "index"):
        if not rules.judge({**values, "flash_attn_from": form}, about="flash_attn_from").broken:
            return form
    return "source"
