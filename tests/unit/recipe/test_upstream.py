"""What registries and release pages tell of bases and wheels, and which versions could take a pin's place."""

import hashlib
import json
import random
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
from packaging.version import Version

import loopback
from stackcheck.matrix import compat, resolve
from stackcheck.matrix.explain import kindest_first
from stackcheck.recipe import indexes
from stackcheck.recipe.upstream import OutOfReachError, Upstream, split_reference

DIGEST = "sha256:" + "7" * 64


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("ubuntu:24.04", ("docker.io", "ubuntu", "24.04")),
        ("rocm/dev-ubuntu-24.04:7.2.4-complete", ("docker.io", "rocm/dev-ubuntu-24.04", "7.2.4-complete")),
        ("quay.io/pypa/manylinux_2_28:1", ("quay.io", "pypa/manylinux_2_28", "1")),
        ("127.0.0.1:5000/base:1", ("127.0.0.1:5000", "base", "1")),
        ("localhost/base:1", ("localhost", "base", "1")),
    ],
)
def test_a_base_is_read_as_docker_reads_it(reference, expected):
    assert split_reference(reference) == expected


@pytest.fixture
def releases(tmp_path) -> Iterator[str]:
    """A release page in the form of GitHub's API, served on loopback."""
    with loopback.serving(SimpleHTTPRequestHandler, tmp_path) as host:
        address = f"http://{host}"
        (tmp_path / "old.whl").write_bytes(b"an old wheel")
        assets = [
            {"name": "new.whl", "digest": DIGEST, "browser_download_url": f"{address}/gone.whl"},
            {"name": "old.whl", "digest": None, "browser_download_url": f"{address}/old.whl"},
        ]
        (tmp_path / "v2.8.3").write_text(json.dumps({"assets": assets}))
        yield address


def test_an_official_wheels_checksum_is_the_releases_or_that_of_its_bytes(releases):
    upstream = Upstream(releases=releases)
    assert upstream.wheel_sha256("2.8.3", "new.whl") == "7" * 64
    assert upstream.wheel_sha256("2.8.3", "old.whl") == hashlib.sha256(b"an old wheel").hexdigest()
    with pytest.raises(OutOfReachError, match=r"has no other\.whl"):
        upstream.wheel_sha256("2.8.3", "other.whl")
    with pytest.raises(OutOfReachError, match="404"):
        upstream.wheel_sha256("9.9", "new.whl")
    assert upstream.answers(f"{releases}/old.whl") is None


def test_a_place_that_does_not_answer_is_named_and_asked_once():
    with loopback.serving(BaseHTTPRequestHandler) as nobody:
        upstream = Upstream(releases=f"http://{nobody}")
    asked = []
    ask = upstream._json
    upstream._json = lambda url: (asked.append(url), ask(url))[1]
    for _ in range(2):
        with pytest.raises(OutOfReachError, match=f"{nobody} is out of reach"):
            upstream.wheel_sha256("2.8.3", "new.whl")
    assert len(asked) == 1
    with pytest.raises(OutOfReachError, match="is out of reach"):
        upstream.base_digest(f"{nobody}/base:1")


ROOT = Path(__file__).parents[3]
RULES = compat.load_rules(ROOT / "images" / "compat.yaml")
STACKS = resolve.load_stacks(ROOT)
LOCALS = ("", "+cpu", "+cu126", "+cu128", "+cu130", "+rocm6.4", "+rocm7.1", "+rocm7.2", "+rocm7.14")
RELEASES = (
    "2.0.0",
    "2.7.1",
    "2.11.0",
    "2.13.0",
    "2.14.1",
    "2.15.0",
    "2.16.0",
    "2.16.0rc1",
    "4.0.0b36",
    "4.0.0b40",
)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_an_index_lists_nothing_is_named_that_could_not_replace_the_pin(seed):
    at = random.Random(seed)
    index = {
        name: [
            f"{release}{at.choice(LOCALS)}" for release in at.sample(RELEASES, at.randrange(len(RELEASES)))
        ]
        for stack in STACKS
        for name in (pin.partition("==")[0] for pin in stack.requirements)
    }
    by_id = {stack.id: stack for stack in STACKS}
    for one in indexes.behind(STACKS, RULES, lambda name, _pre, _stack: index.get(name, [])):
        if one.newest is None:
            continue
        found, pinned = Version(one.newest), Version(one.pinned)
        assert found > pinned
        assert found.local == pinned.local
        assert pinned.is_prerelease or not found.is_prerelease
        assert one.newest in index[one.name]
        for stack in (by_id[name] for name in one.stacks):
            if one.name == "torch" and stack.runtime_version:
                asked = {"vendor": stack.vendor, stack.runtime: stack.runtime_version, "wheels": stack.wheels}
                answer = kindest_first({**asked, "torch": found.public}, RULES)[0].answer
                assert answer != "refused", (stack.id, one.newest)


def test_torch_of_another_build_is_no_successor():
    (stack,) = (one for one in STACKS if "torch==2.14.1+rocm7.2" in one.requirements)
    listed = {"torch": ["2.15.0", "2.15.0+cu130", "2.14.1+rocm7.2", "2.13.0+rocm7.2"]}
    found = {b.name: b for b in indexes.behind([stack], RULES, lambda name, *_rest: listed.get(name, ["0"]))}
    assert "torch" not in found
    listed["torch"].append("2.14.2+rocm7.2")
    found = {b.name: b for b in indexes.behind([stack], RULES, lambda name, *_rest: listed.get(name, ["0"]))}
    assert found["torch"].newest == "2.14.2+rocm7.2"


def test_a_pin_that_is_a_pre_release_is_compared_with_pre_releases():
    (stack,) = (one for one in STACKS if one.flash_attn and Version(one.flash_attn.version).is_prerelease)
    name, pinned = stack.flash_attn.package, Version(stack.flash_attn.version)
    later = f"{pinned.base_version}b{pinned.pre[1] + 1}"
    asked: list[tuple[str, bool]] = []

    def versions(package: str, pre: bool, _stack: object) -> list[str]:
        asked.append((package, pre))
        return [later, str(pinned)] if package == name else []

    found = {one.name: one for one in indexes.behind([stack], RULES, versions)}
    assert found[name].newest == later
    assert dict(asked)[name] is True
    assert dict(asked)["torch"] is False
