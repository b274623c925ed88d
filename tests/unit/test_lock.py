from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from stackcheck import lock, resolve

ROOT = Path(__file__).parents[2]
STACKS = resolve.load_stacks(ROOT)
CPU = resolve.select(STACKS, ["cpu*"])[0]
LOCKS = sorted(ROOT.glob("images/*/requirements.lock"))


def test_every_locked_package_has_a_hash():
    for path in LOCKS:
        names = re.findall(r"^[\w.-]+==", path.read_text("utf-8"), re.MULTILINE)
        assert len(lock._hashes(path)) == len(names) > 0


def test_no_lock_names_an_index_host_or_a_path():
    for path in LOCKS:
        body = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
        assert not any("://" in line or line.startswith(("-", "/")) for line in body)


def test_a_lock_that_disagrees_with_the_rules_is_not_complete():
    stack = resolve.select(STACKS, ["cuda13.0-*debian12"])[0]
    path = ROOT / "images" / stack.id / "requirements.lock"
    assert lock._disagreements(stack, path) == []
    wrong = dataclasses.replace(stack, triton=resolve.Package(name="triton", version="3.6.0"))
    assert lock._disagreements(wrong, path) == ["the indexes give triton 3.7.1, the rules 3.6.0"]


def test_a_wheel_that_only_amd_builds_is_never_taken_from_the_index():
    stack = resolve.select(STACKS, ["*-amd"])[0]
    text, reason = lock.compile_requirements(stack)
    assert text is None
    assert reason
    assert "repo.radeon.com" in reason


def test_what_is_missing_is_named_and_not_invented():
    stack = resolve.select(STACKS, ["rocm7.2.4-torch2.13.0*"])[0]
    assert stack.base.digest is None
    assert any("ubuntu:24.04" in reason for reason in stack.missing)
    assert any("download.pytorch.org/whl/rocm7.2" in reason for reason in stack.missing)


def test_the_cpu_stack_is_locked():
    assert CPU.missing == ()
