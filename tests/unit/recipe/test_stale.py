"""`render --check` sees pins and locks that no longer say what their stack needs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stackcheck.matrix import resolve
from stackcheck.recipe import render, rocm
from stackcheck.recipe.extensions import extensions

ROOT = Path(__file__).parents[3]
STACKS = resolve.load_stacks(ROOT)


def chosen(stacks: tuple[resolve.Stack, ...]) -> list[resolve.Stack]:
    """Stacks of each kind: AMD's package, wheels of extensions, sources, locked, with a replaced package."""
    kinds = (
        rocm.takes_smi,
        lambda stack: any(extension.wheel for extension in extensions(stack)),
        lambda stack: any(not extension.wheel for extension in extensions(stack)),
        lambda stack: not stack.missing,
        lambda stack: stack.replacements,
    )
    found = [one for kind in kinds for one in [stack for stack in stacks if kind(stack)][:2]]
    return list({one.id: one for one in found}.values())


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.id)
def test_the_pins_of_this_checkout_are_what_their_stacks_need(stack) -> None:
    assert render.stale(stack, ROOT / "images") == ()


Change = "Callable[[dict[str, Any]], object]"


def drop_a_reason(pins: dict[str, Any]) -> None:
    if pins["missing"]:
        pins["missing"] = pins["missing"][:-1] or ["something else"]


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no entry of AMD's package": lambda pins: pins.pop("debs", None),
    "a package that it does not need": lambda pins: pins.setdefault("debs", {}).update(other=None),
    "no bases": lambda pins: pins.update(bases={}),
    "another base": lambda pins: pins["bases"].update({"ubuntu:18.04": None}),
    "no sources": lambda pins: pins.update(sources={}),
    "another version": lambda pins: [source.update(version="0.1") for source in pins["sources"].values()],
    "said to be locked": lambda pins: pins.update(locked=not pins["locked"]),
    "of another stack": lambda pins: pins.update(stack_id="cpu"),
    "a reason less": drop_a_reason,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("stack", chosen(STACKS), ids=lambda stack: stack.id)
def test_a_change_of_the_pins_is_seen_unless_it_says_the_same(stack, change, tmp_path) -> None:
    folder = tmp_path / stack.id
    shutil.copytree(ROOT / "images" / stack.id, folder)
    path = folder / "pins.json"
    before = json.loads(path.read_text())
    pins = json.loads(path.read_text())
    CHANGES[change](pins)
    path.write_text(json.dumps(pins))
    same = pins == before
    if change == "a reason less":  # a reason that names no entry is not missed
        gone = [reason for reason in before["missing"] if reason not in pins["missing"]]
        entries = [*before["bases"], *before.get("debs", {})]
        same = not any(name in reason for reason in gone for name in entries)
    assert bool(render.stale(stack, tmp_path)) == (not same)


def test_a_lock_that_lacks_a_requirement_or_is_not_needed_is_seen(tmp_path) -> None:
    (stack,) = (one for one in STACKS if one.vendor == "cpu")
    shutil.copytree(ROOT / "images" / stack.id, tmp_path / stack.id)
    path = tmp_path / stack.id / "requirements.lock"
    text = path.read_text()
    path.write_text(text.replace("\nnumpy==", "\nnumpx=="))
    (line,) = render.stale(stack, tmp_path)
    assert line.startswith(f"images/{stack.id}/requirements.lock: does not hold every one of ")
    path.write_text(text)
    (path.parent / "flash-attn.lock").write_text("flash-attn==2.8.3\n")
    (line,) = render.stale(stack, tmp_path)
    assert "flash-attn.lock: the stack does not need it" in line
    shutil.rmtree(path.parent)
    assert render.stale(stack, tmp_path) == (f"images/{stack.id}/pins.json: is missing",)
