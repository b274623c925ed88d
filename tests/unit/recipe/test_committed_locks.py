"""The locks and pins of this checkout are whole, agree with each other and the rules, and invent nothing."""

import dataclasses
import json
import re
from pathlib import Path

from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Package
from stackcheck.recipe import indexes, lock

ROOT = Path(__file__).parents[3]
STACKS = resolve.load_stacks(ROOT)
CPU = resolve.select(STACKS, ["cpu*"])[0]
LOCKS = sorted(ROOT.glob("images/*/*.lock"))
PINS = sorted(ROOT.glob("images/*/pins.json"))


def test_every_locked_package_has_a_hash() -> None:
    for path in LOCKS:
        names = re.findall(r"^[\w.-]+==", path.read_text("utf-8"), re.MULTILINE)
        assert len(indexes.read_lock(path)) == len(names) > 0


def test_no_lock_names_an_index_host_or_a_path() -> None:
    for path in LOCKS:
        body = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        assert not any("://" in line or line.startswith(("-", "/")) for line in body)


def test_pins_and_locks_tell_the_same_checksums() -> None:
    for path in PINS:
        for name, source in json.loads(path.read_text("utf-8"))["sources"].items():
            locked = indexes.read_lock(path.with_name(f"{name}.lock")).get(name)
            assert (locked and locked[1]) == (source["sha256"] and (f"sha256:{source['sha256']}",))


def test_a_lock_that_disagrees_with_the_rules_is_not_complete() -> None:
    stack = resolve.select(STACKS, ["cuda13.0-*debian12"])[0]
    path = ROOT / "images" / stack.id / "requirements.lock"
    assert lock.disagreements(stack, path) == []
    wrong = dataclasses.replace(stack, triton=Package(name="triton", version="3.6.0"))
    assert lock.disagreements(wrong, path) == ["the indexes give triton 3.7.1, the rules 3.6.0"]


def test_what_is_missing_is_named_and_not_invented() -> None:
    stack = resolve.select(STACKS, ["rocm7.2.1-torch2.13.0*"])[0]
    assert stack.base.digest is None
    assert any("ubuntu:24.04" in reason for reason in stack.missing)
    assert any("download.pytorch.org/whl/rocm7.2" in reason for reason in stack.missing)


def test_the_cpu_stack_is_locked() -> None:
    assert CPU.missing == ()
