"""What `lock` asks for a package that pip's own places lack, a build asks too, however pip is configured."""

import configparser
import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from stackcheck.files import pip_settings
from stackcheck.imaging.wheels import host_settings, wheel_supply, wheelhouse
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import NO_MIRRORS, Mirrors
from stackcheck.recipe import lock
from stackcheck.recipe.indexes import UnresolvedError
from stackcheck.recipe.upstream import OutOfReachError, Upstream, torch_places

ROOT = Path(__file__).resolve().parents[4]
PUBLIC, AMDS = "https://download.pytorch.org/whl/", "https://repo.radeon.com/rocm/manylinux/"
MIRRORED = Mirrors(
    urls={
        PUBLIC.rstrip("/"): "https://mirror.example.org/torch",
        AMDS.rstrip("/"): "https://mirror.example.org/amd",
    }
)
# What a host's pip may be told, each alone and with the others.
INDEX = (None, "https://pip.example.org/simple", "file:///srv/simple")
EXTRA = (None, "https://more.example.org/simple", "file:///srv/more")
LINKS = (None, "https://links.example.org/", "/srv/wheels")
NO_INDEX = (None, "true")
STACKS = (("amd", "upstream"), ("amd", "amd"), ("nvidia", "upstream"))
CONFIGURATIONS = [*itertools.product(INDEX, EXTRA, LINKS, NO_INDEX)]


@functools.cache
def stack_of(vendor: str, wheels: str) -> Stack:
    """A stack of the matrix whose torch is built there."""
    every = resolve.load_stacks(ROOT)
    return next(one for one in every if (one.vendor, one.wheels) == (vendor, wheels))


def configure(monkeypatch: pytest.MonkeyPatch, values: Sequence[str | None]) -> str:
    names = ("index-url", "extra-index-url", "find-links", "no-index")
    listed = "".join(f"global.{n}='{v}'\n" for n, v in zip(names, values, strict=True) if v)
    monkeypatch.setattr(pip_settings, "_listed", lambda _environment: listed)
    return listed


def asked_by_lock(stack: Stack, upstream: Upstream) -> tuple[str, ...]:
    """The last question's places: as if pip's own places had no torch."""
    questions: list[tuple[str, ...]] = []

    def question(places: Sequence[str]) -> str:
        questions.append(tuple(places))
        if len(questions) == 1 and stack.wheels != "amd":
            raise UnresolvedError("torch", silent=False)
        return "found"

    lock.ask(stack, upstream, question)
    return questions[-1]


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize(
    ("mirrors", "reached"), [(NO_MIRRORS, True), (NO_MIRRORS, False), (MIRRORED, True), (MIRRORED, False)]
)
def test_a_build_asks_torchs_makers_where_and_only_where_lock_did(
    name, mirrors, reached, monkeypatch, tmp_path
) -> None:
    stack = stack_of(*name)
    monkeypatch.setattr(Upstream, "answers", lambda _self, url: None if reached else f"{url}: out of reach")
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    ((_, public),) = torch_places(stack)
    own = mirrors.url(public)
    for values in CONFIGURATIONS:
        configure(monkeypatch, values)
        upstream = Upstream(mirrors=mirrors)
        try:
            of_lock = own in [place.partition("=")[2] for place in asked_by_lock(stack, upstream)]
        except (UnresolvedError, OutOfReachError):
            of_lock = False
        told = configparser.ConfigParser()
        told.read_string(conf_of_build(stack, upstream, monkeypatch, tmp_path) or "[global]\n")
        settings = dict(told["global"])
        named = " ".join(
            settings.get(setting, "") for setting in ("index-url", "extra-index-url", "find-links")
        ).split()
        asked = own in named and ("no-index" not in settings or own in settings.get("find-links", ""))
        if of_lock:
            assert asked, (values, settings)
        elif not (mirrors is MIRRORED or reached):
            assert own not in named, (values, settings)
        if values[0] == INDEX[2]:  # the host's main index is a folder: the default one is never asked
            assert "no-index" in settings or "index-url" in settings


def conf_of_build(stack: Stack, upstream: Upstream, monkeypatch: pytest.MonkeyPatch, folder: Path) -> str:
    """The pip.conf of a stage that lacks torch's wheel."""
    supply = wheel_supply.Supply(
        settings=host_settings.host_settings(), closed=False, cache=None, cached={}, debs={},
        upstream=upstream, report=print,
    )  # fmt: skip
    found = SimpleNamespace(lay_out=lambda _folder: ["a.whl"], missing=lambda *_args: ["torch"])
    monkeypatch.setattr(wheel_supply, "packages", lambda *_args: ("torch",))
    monkeypatch.setattr(wheel_supply, "pinned", lambda *_args: ())
    monkeypatch.setattr(wheelhouse, "look", lambda *_args: found)
    plan = SimpleNamespace(stack=dataclasses.replace(stack), platform="linux/amd64")
    return supply.lay_out(plan, SimpleNamespace(instructions=()), folder)  # type: ignore[arg-type]


def test_a_wheelhouse_of_our_own_does_not_hide_torchs_index(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(Upstream, "answers", lambda *_args: None)
    monkeypatch.setattr(host_settings, "ca_bundle", lambda _settings: None)
    configure(monkeypatch, (None, None, None, None))
    conf = conf_of_build(stack_of(*STACKS[0]), Upstream(), monkeypatch, tmp_path)
    assert f"extra-index-url = {PUBLIC}rocm" in conf
    assert "find-links = /stackcheck-wheelhouse\n" in conf
