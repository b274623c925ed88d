"""Stages that stacks share, and changes of one stage's pin: what BuildKit does, and what is said of it."""

import dataclasses
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from small_recipe import render_from
from small_stacks import ASSETS
from stackcheck.engine.client import Engine
from stackcheck.imaging import build
from stackcheck.matrix.stack import Stack

pytestmark = pytest.mark.integration

SHARED = ("base", "kernel-build", "kernel", "packages")


class Checkout:
    """Stacks that differ in their stack.json alone, and so in their last stage; no run repeats another."""

    def __init__(self, root: Path, pattern: Stack, engine: Engine) -> None:
        self.root = root
        self.pattern = pattern
        self.engine = engine
        self.nonce = secrets.token_hex(8)
        self.lines: list[str] = []
        self.names: set[str] = set()

    def stack(self, name: str) -> Stack:
        stack = dataclasses.replace(self.pattern, id=f"shared-{name}-{self.nonce}")
        text = (ASSETS / "shared.Dockerfile").read_text().replace("@NONCE@", self.nonce)
        render_from(text, stack, self.root)
        return stack

    def change(self, stack: Stack, old: str, new: str) -> None:
        text = (self.root / "images" / stack.id / "Dockerfile").read_text()
        assert old in text
        render_from(text.replace(old, new), stack, self.root)

    def build(self, *stacks: Stack, **chosen: object) -> tuple[build.Image, ...]:
        options = build.Options(**chosen)  # type: ignore[arg-type]
        images = build.build(stacks, self.engine, root=self.root, report=self.lines.append, options=options)
        self.names |= {image.reference for image in images}
        return images


@pytest.fixture
def small(empty_checkout: Path, cpu_stack: Stack, engine: Engine) -> Iterator[Checkout]:
    made = Checkout(empty_checkout, cpu_stack, engine)
    yield made
    for name in made.names:
        engine.remove(name)


def how(image: build.Image) -> dict[str, str]:
    return {use.name: use.how for use in image.stages}


def layers(image: build.Image) -> list[str]:
    return [layer.digest for layer in image.layers]


@pytest.mark.parametrize("no_cache", [False, True])
def test_two_stacks_that_differ_in_the_last_stage_build_every_other_stage_once(small, no_cache):
    first, second = small.build(small.stack("one"), small.stack("two"), no_cache=no_cache)
    assert how(first) == dict.fromkeys((*SHARED, "final"), "built")
    assert how(second) == {**dict.fromkeys(SHARED, "shared"), "final": "built"}
    assert {use.key for use in first.stages[:-1]} == {use.key for use in second.stages[:-1]}
    # The layers hold the nanosecond in which they were made, and are the same.
    assert layers(first)[:-1] == layers(second)[:-1]
    assert layers(first)[-1] != layers(second)[-1]
    assert second.shared_bytes == sum(layer.size_bytes for layer in second.layers[:-1]) > 1_000_000
    said = small.lines[-1]
    assert said.startswith("stages: 6 built, 4 reused (4 shared within this build); ")
    assert f"{second.shared_bytes / 1e6:.1f} MB saved" in said
    log = (small.root / "build" / str(first.stack_id) / "build.log").read_text()
    assert len({line.split()[0] for line in log.splitlines() if "date +%N" in line and "] RUN" in line}) == 3


def test_changing_one_builders_pin_builds_that_stage_and_the_last_one_again(small):
    stack = small.stack("one")
    (before,) = small.build(stack)
    small.change(stack, "kernel==1.0", "kernel==1.1")
    (after,) = small.build(stack)
    assert how(after) == {
        "base": "cached",
        "kernel-build": "built",
        "kernel": "built",
        "packages": "cached",
        "final": "built",
    }
    changed = {b.name for b, a in zip(before.stages, after.stages, strict=True) if a.key != b.key}
    assert changed == {"kernel-build", "kernel", "final"}
    assert layers(after)[:3] == layers(before)[:3]
    assert small.lines[-1].startswith("stages: 3 built, 2 reused (2 in the engine's cache); ")
    read = build.load_image(small.root / "build" / stack.id / "image.json")
    assert read.stages == after.stages


def test_a_stack_that_comes_later_shares_what_is_there_and_its_bytes_are_counted(small):
    (first,) = small.build(small.stack("one"))
    assert first.shared_bytes == 0
    (second,) = small.build(small.stack("two"))
    assert how(second) == {**dict.fromkeys(SHARED, "cached"), "final": "built"}
    assert second.shared_bytes == sum(layer.size_bytes for layer in second.layers[:-1])


def test_what_a_stage_hands_over_is_taken_from_the_wheel_cache_and_not_built_again(small, tmp_path):
    cache = tmp_path / "shared-storage"
    (first,) = small.build(small.stack("one"), wheel_cache=cache)
    (second,) = small.build(small.stack("two"), wheel_cache=cache)
    assert how(second) == {
        "base": "cached",
        "kernel-build": "handed over",
        "kernel": "handed over",
        "packages": "cached",
        "final": "built",
    }
    log = (small.root / "build" / str(second.stack_id) / "build.log").read_text()
    assert "kernel-build" not in log
    assert layers(first)[:-1] == layers(second)[:-1]
    (key,) = [use.key for use in first.stages if use.name == "kernel"]
    next(cache.glob(f"stages/*/{key}/files/made")).write_text("damaged")
    (third,) = small.build(small.stack("three"), wheel_cache=cache)
    assert any("is damaged: removed" in line for line in small.lines)
    assert how(third)["kernel"] == "cached"


def test_images_that_did_not_change_count_as_reused(small):
    stacks = small.stack("one"), small.stack("two")
    small.build(*stacks)
    images = small.build(*stacks)
    assert all(image.reused for image in images)
    assert build.summary(images).startswith("stages: 0 built, 10 reused (10 in images that did not change)")
