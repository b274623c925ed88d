"""Locks and pins that no longer say what their stack needs: the matrix or this tool has changed since.

In: a stack, its committed `pins.json` and locks. Out: one line a contradiction. Pure but for reading; that an
index has newer files is no contradiction.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from stackcheck.recipe import lock, rocm
from stackcheck.recipe.extensions import extensions, needs, toolchain

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from stackcheck.matrix.stack import Stack


def stale(stack: Stack, images: Path) -> tuple[str, ...]:
    """What is wrong with a stack's pins, each as `images/ID/FILE: what`; empty if nothing is."""
    folder = images / stack.id
    path = folder / "pins.json"
    if not path.is_file():
        return (f"images/{stack.id}/pins.json: is missing",)
    pins = json.loads(path.read_text(encoding="utf-8"))
    found = [*_pins(stack, pins), *_locks(stack, folder, pins.get("missing", []))]
    return tuple(f"images/{stack.id}/{line}" for line in found)


def _pins(stack: Stack, pins: Mapping[str, Any]) -> Iterator[str]:
    missing = pins.get("missing", [])
    if pins.get("stack_id") != stack.id:
        yield f"pins.json: is of another stack: {pins.get('stack_id')}"
    if pins.get("locked") is not (not missing):
        yield "pins.json: `locked` contradicts `missing`"
    bases = [str(base.reference) for base in (stack.base, stack.builder) if base and base.reference]
    yield from _differ("bases", dict.fromkeys(bases), pins.get("bases", {}), missing)
    # A release page that is out of reach is named by its host, for several packages at once.
    named = [*missing, *(e.name for e in extensions(stack) if missing)]
    yield from _differ("sources", dict.fromkeys(e.name for e in extensions(stack)), _files(pins), named)
    for extension in extensions(stack):
        version = pins.get("sources", {}).get(extension.name, {}).get("version")
        if version not in {None, extension.version}:
            yield f"pins.json: {extension.name} {version} is pinned, the stack needs {extension.version}"
    debs = pins.get("debs", {})
    wanted = {rocm.SMI: None} if rocm.takes_smi(stack) else {}
    yield from _differ("debs", wanted, debs, missing)
    if wanted and debs.get(rocm.SMI) and debs[rocm.SMI]["archive"] != rocm.archive(stack):
        yield f"pins.json: {rocm.SMI} is of {debs[rocm.SMI]['archive']}, not of {rocm.archive(stack)}"


def _files(pins: Mapping[str, Any]) -> Mapping[str, object]:
    return {name: source.get("file") for name, source in pins.get("sources", {}).items()}


def _differ(
    name: str, wanted: Mapping[str, None], held: Mapping[str, object], missing: Sequence[str]
) -> Iterator[str]:
    """The names that one side alone has, and those without a value that `missing` does not explain."""
    for one in wanted:
        if one not in held:
            yield f"pins.json: `{name}` has no entry of {one}"
        if not held.get(one) and not any(one in reason for reason in missing):
            yield f"pins.json: `missing` does not say why there is no {one}"
    for one in held:
        if one not in wanted:
            yield f"pins.json: `{name}` has {one}, which the stack does not need"


def _locks(stack: Stack, folder: Path, missing: Sequence[str]) -> Iterator[str]:
    """Locks that do not hold what the stack asks for, although nothing is said to be missing."""
    asked = {
        "requirements": (*stack.requirements, *needs(stack)),
        "toolchain": toolchain(stack),
        lock.CHOSEN: tuple(one.pin for one in stack.replacements),
        **{extension.name: (extension.pin,) for extension in extensions(stack)},
    }
    for name, wanted in asked.items():
        path = folder / f"{name}.lock"
        if wanted and not lock.covers(path, wanted) and (path.is_file() or not missing):
            yield f"{name}.lock: does not hold every one of {', '.join(wanted)}"
    for path in sorted(folder.glob("*.lock")):
        if not asked.get(path.stem):
            yield f"{path.name}: the stack does not need it"
