"""Which ROCm a torch was built with counts to the patch: no name evades what is refused below it."""

from pathlib import Path

import pytest

from stackcheck.matrix import compat, resolve

ROOT = Path(__file__).parents[3]
STACKS = resolve.load_stacks(ROOT)


@pytest.mark.parametrize(
    ("found", "declared", "same"),
    [
        ("7.2.1", "7.2.1", True),
        ("7.2.1", "7.2.4", False),
        ("7.2.4", "7.2.1", False),
        ("7.2.26015-fc0010cf6a", "7.2.0", True),
        ("7.2.26015", "7.2.1", False),
        ("7.2.53211", "7.2.0", False),
        ("7.2.53211", "7.2.4", True),  # HIP alone cannot tell; a wheel from torch 2.14 on says its ROCm too
        ("7.1.25424", "7.1.1", False),
        ("7.14.60850", "7.14.1", True),
        ("7.2.99999", "7.2.1", False),  # not known: fail closed
        ("none", "7.2.1", False),
    ],
)
def test_a_release_is_compared_to_its_patch(found: str, declared: str, same: bool, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests/acceptance"))
    from vendors import amd

    assert amd.is_release(found, declared) is same


@pytest.mark.parametrize("stack", [one for one in STACKS if one.wheels == "upstream" and one.vendor == "amd"])
def test_no_patch_of_the_matrix_is_another_than_the_wheels(stack) -> None:
    """The newest patch under the same minor is no name for these wheels, unless they carry it."""
    rules = compat.load_rules(ROOT / "images/compat.yaml")
    (row,) = [rule for rule in rules if rule.id == f"R1-upstream-rocm[{stack.torch}]"]
    whole = [pattern for pattern in row.require["rocm"] if pattern.count(".") == 2]
    minor = stack.runtime_version.rpartition(".")[0]
    assert stack.runtime_version in whole or minor in row.require["rocm"]
    assert not any(one.startswith(f"{minor}.") for one in whole if one != stack.runtime_version)
