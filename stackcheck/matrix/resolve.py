"""Matrix + rules (+ pins) -> stacks: every cell judged, and what the rules decide filled in.

In: a `Matrix`, the compatibility rules, the known issues, and what `lock` wrote. Out: frozen `Stack`s.
Triton, the collective library and FlashAttention's form are not chosen by hand: the rules name them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from stackcheck.errors import ConfigurationError, NothingSelectedError, did_you_mean
from stackcheck.files import yamlfile
from stackcheck.matrix import compat, expand, known_issues, matrix
from stackcheck.matrix import pins as pinned
from stackcheck.matrix.expand import Cell
from stackcheck.matrix.known_issues import NO_ISSUES, KnownIssue, KnownIssues
from stackcheck.matrix.matrix import Matrix, StackSettings, TestTarget
from stackcheck.matrix.pins import Pins
from stackcheck.matrix.rules import Rule, RuleFinding, RuleJudgement, RuleSet
from stackcheck.matrix.stack import (
    Base,
    FlashAttention,
    Package,
    Replacement,
    Stack,
    flash_attention_package,
    nccl_package,
)
from stackcheck.vendors import Vendor, environment

NOTHING: Mapping[str, str] = MappingProxyType({})
NEXT = "stackcheck explain STACK"


def load_stacks(
    root: Path, selectors: Sequence[str] = (), *, refused: Callable[[str], object] | None = None
) -> tuple[Stack, ...]:
    """The stacks of a checkout that the selectors name; one that is refused stops no other.

    Raises:
        ConfigurationError: A file is wrong, or a selected cell breaks a rule or has an issue that refuses it.
        NothingSelectedError: No stack matches.
    """
    found, issues = (
        matrix.load_matrix(root / "matrix.yaml"),
        known_issues.load_known_issues(root / "images" / "known-issues.yaml"),
    )
    rules = compat.load_rules(root / "images" / "compat.yaml")
    judged = [*_judged(found, rules, issues, pinned.read_pins(root))]
    problems = [line for stack, lines in judged if _named(stack, selectors) for line in lines]
    if problems and refused is None:
        raise yamlfile.refused(problems, next_step=NEXT)
    if refused is not None:
        for line in problems:
            refused(line)
    return select([stack for stack, lines in judged if not lines], selectors)


def usable(root: Path) -> tuple[Stack, ...]:
    """Every stack that no rule refuses, for who looks one up: a refused one is as if it were not there."""
    return load_stacks(root, refused=str)


def _named(stack: Stack, selectors: Sequence[str]) -> bool:
    return not selectors or any(fnmatchcase(stack.id, pattern) for pattern in selectors)


def load_stack(root: Path, name: str, where: str) -> Stack:
    """The one stack that a name selects; `where` is the place of the name in a command line.

    Raises:
        ConfigurationError: It selects several.
    """
    found = load_stacks(root, (name,))
    if len(found) != 1:
        raise ConfigurationError(
            "the name selects several stacks",
            where=where,
            got=", ".join(stack.id for stack in found),
            expected="one stack id",
            next_step="stackcheck list",
        )
    return found[0]


def select(stacks: Sequence[Stack], selectors: Sequence[str]) -> tuple[Stack, ...]:
    """The stacks whose id matches one of the fnmatch patterns; all of them without a pattern."""
    if not selectors:
        return tuple(stacks)
    chosen = tuple(stack for stack in stacks if _named(stack, selectors))
    if not chosen:
        ids = [stack.id for stack in stacks]
        near = [found for selector in selectors if (found := did_you_mean(selector, ids))]
        raise NothingSelectedError(
            "no stack matches",
            got=" ".join(selectors),
            expected=" ".join(near) or None,
            next_step="stackcheck list",
        )
    return chosen


def resolve(
    found: Matrix, rules: RuleSet, issues: KnownIssues = NO_ISSUES, *, pins: Mapping[str, Pins] | None = None
) -> tuple[Stack, ...]:
    """Every stack of a matrix, with its known issues.

    Raises:
        ConfigurationError: One line a cell that breaks a rule, or that no rule knows and is not experimental.
    """
    judged = [*_judged(found, rules, issues, pins or {})]
    if problems := [line for _, lines in judged for line in lines]:
        raise yamlfile.refused(problems, next_step=NEXT)
    return tuple(stack for stack, _ in judged)


def _judged(
    found: Matrix, rules: RuleSet, issues: KnownIssues, pins: Mapping[str, Pins]
) -> Iterator[tuple[Stack, list[str]]]:
    """Each stack, and a line for each rule that it breaks."""
    settings_of, judging = expand.settings(found), issues.refusing(rules)
    for cell in expand.expand(found):
        settings = settings_of(cell)
        packages = packages_of(cell, settings, found)
        values = combination(cell, found.runtimes[cell.runtime].vendor, packages, rules)
        own = replaced(values, cell, rules)
        stack = stack_of(cell, settings, found, values, pins.get(cell.id), own=own)
        lines = [f"matrix.yaml: {cell.place}: {line}" for line in _refusals(stack, values, judging)]
        yield dataclasses.replace(stack, known_issues=known_issues_of(stack, values, issues)), lines


def known_issues_of(stack: Stack, values: Mapping[str, str], issues: KnownIssues) -> tuple[KnownIssue, ...]:
    """The issues of a stack, on any of its architectures and with any driver of its test machines."""
    return issues.of(values, stack.archs, [target.driver for target in stack.tested_on or ()])


def _refusals(stack: Stack, values: Mapping[str, str], rules: RuleSet) -> Iterator[str]:
    for rule in broken_by_cell(values, stack.archs, stack.tested_on or (), rules).values():
        if not (rule.unknown and stack.experimental):
            unknown = rule.require.keys() & values.keys() if rule.closing else ()
            row = "".join(f"{axis} {values[axis]}: " for axis in unknown)
            yield f"{stack.id} breaks {rule.id}: {row}{rule.because} ({rule.source})"


def stack_of(
    cell: Cell,
    settings: StackSettings,
    found: Matrix,
    values: Mapping[str, str],
    pins: Pins | None = None,
    *,
    own: Mapping[str, str] = NOTHING,
) -> Stack:
    """The stack of a cell; `values` is its `combination`, `own` what torch pins where the matrix chose."""
    defaults = found.runtimes[cell.runtime]
    collective = COLLECTIVES.get(defaults.vendor)
    return Stack(
        id=cell.id,
        vendor=defaults.vendor,
        runtime=cell.runtime,
        runtime_version=cell.version,
        torch=cell.torch,
        python=cell.python,
        os=cell.os,
        wheels=cell.wheels,
        archs=settings.archs or (),
        triton=_package(values.get("triton_package", "triton"), values.get("triton")),
        collective=_package(collective, values.get(collective or "")),
        flash_attn=_flash_attn(cell, settings, values, pins),
        base=_base(cell, settings, found, pins),
        builder=_builder(settings, pins),
        layout=values.get("layout"),
        cxx11abi=values.get("cxx11abi"),
        requirements=_requirements(cell, settings, found, values),
        env=_env(cell, settings, found),
        tested_on=settings.tested_on if settings.tested_on is not None else defaults.tested_on,
        size_budget_bytes=int((settings.size_budget_gb or 20) * 1e9),
        experimental=bool(settings.experimental),
        missing=pins.missing if pins else (f"{cell.id} was never locked",),
        extensions=tuple(Package(name=n, version=v) for n, v in sorted((settings.extensions or {}).items())),
        replacements=tuple(_replacements(cell, values, own)),
        matrix_digest=found.digest,
        wheels_from=pins.wheels_from if pins else None,
        values=values,
    )


def _replacements(cell: Cell, values: Mapping[str, str], own: Mapping[str, str]) -> Iterator[Replacement]:
    names = {"nccl": nccl_package(cell.version or ""), "triton": values.get("triton_package", "triton")}
    for axis, version in own.items():
        yield Replacement(name=names[axis], version=values[axis], instead_of=version)


_FORMS: Mapping[str, Literal["wheel", "source", "index"]] = {
    "wheel": "wheel",
    "source": "source",
    "index": "index",
}
# Many stacks share these nouns.
_shared_base = lru_cache(maxsize=1000)(Base)
_shared_flash_attn = lru_cache(maxsize=1000)(FlashAttention)


@lru_cache(maxsize=1000)
def _package(name: str | None, version: str | None) -> Package | None:
    return Package(name=name, version=version) if name and version else None


def _flash_attn(
    cell: Cell, settings: StackSettings, values: Mapping[str, str], pins: Pins | None
) -> FlashAttention | None:
    if cell.flash_attn is None:
        return None
    source = pins.sources.get("flash-attn") if pins else None
    return _shared_flash_attn(
        version=cell.flash_attn,
        form=_FORMS[values["flash_attn_from"]],
        backend=(settings.flash_attn_backend or "ck") if values["vendor"] == "amd" else None,
        sha256=source.sha256 if source else None,
    )


def _base(cell: Cell, settings: StackSettings, found: Matrix, pins: Pins | None) -> Base:
    system = found.systems[cell.os]
    # What the wheels of a runtime expect of the system: without torch there are none.
    expected = found.runtimes[cell.runtime].system_packages if cell.torch else ()
    packages = tuple(dict.fromkeys((*system.packages, *expected, *settings.system_packages)))
    if pins and pins.rootfs:
        return _shared_base(kind="host", digest=pins.rootfs.digest, suite=cell.os, packages=packages)
    if system.bootstrap:
        return _shared_base(kind="bootstrap", suite=system.bootstrap, packages=packages)
    digest = pins.bases.get(system.image or "") if pins else None
    return _shared_base(kind="registry", reference=system.image, digest=digest, packages=packages)


def _builder(settings: StackSettings, pins: Pins | None) -> Base | None:
    if settings.builder is None:
        return None
    digest = pins.bases.get(settings.builder) if pins else None
    return _shared_base(kind="registry", reference=settings.builder, digest=digest)


def _requirements(
    cell: Cell, settings: StackSettings, found: Matrix, values: Mapping[str, str]
) -> tuple[str, ...]:
    packages = packages_of(cell, settings, found)
    if cell.flash_attn and values["flash_attn_from"] == "index":
        packages[flash_attention_package(cell.flash_attn)] = cell.flash_attn
    direct = [f"{name}=={version}" for name, version in sorted(packages.items())]
    return (f"torch=={cell.torch}{_local(cell, settings)}", *direct) if cell.torch else tuple(direct)


def _local(cell: Cell, settings: StackSettings) -> str:
    """The local part of the wheel's version, which names what it was built for: `+cpu`, `+cu128`."""
    if cell.wheels != "upstream":
        return ""
    if settings.wheel_tag:
        return f"+{settings.wheel_tag}"
    short = ".".join((cell.version or "").split(".")[:2])
    return {"cpu": "+cpu", "cuda": f"+cu{short.replace('.', '')}", "rocm": f"+rocm{short}"}[cell.runtime]


def _env(cell: Cell, settings: StackSettings, found: Matrix) -> Mapping[str, str]:
    # enroot's hook for PyTorch sets MASTER_ADDR and friends only where PYTORCH_VERSION is set.
    named = {"PYTORCH_VERSION": cell.torch} if cell.torch else {}
    # flash-attn reads it when it is built and again when it is imported (rule R14).
    if cell.flash_attn and settings.flash_attn_backend == "triton":
        named["FLASH_ATTENTION_TRITON_AMD_ENABLE"] = "TRUE"
    defaults = found.runtimes[cell.runtime]
    if cell.torch:
        named |= environment.of_image(defaults.vendor, cell.torch, settings.archs or ())
    return {**named, **defaults.env, **(settings.env or {})}


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
