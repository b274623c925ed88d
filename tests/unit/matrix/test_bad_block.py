"""A block of matrix.yaml that a rule refuses stops no other stack, and names the row that is missing."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from small_stacks import ROOT
from stackcheck.errors import ConfigurationError
from stackcheck.files import yamlfile
from stackcheck.matrix import resolve

GOOD = {stack.id for stack in resolve.load_stacks(ROOT)}
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "torch": ({"torch": "2.99.0"}, r"torch 2\.99\.0: .*`versions\.torch`"),
    "nccl": ({"torch": "2.13.0", "nccl": "2.99.1"}, r"nccl 2\.99\.1: .*`versions\.nccl`"),
    "runtime": ({"version": "13.9", "torch": "2.13.0"}, r"PyTorch builds torch 2\.13\.0 for CUDA"),
}


@pytest.fixture(params=BAD, ids=str)
def bad(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A checkout with one block that is refused, and what its refusal says."""
    block, says = BAD[request.param]
    shutil.copytree(ROOT / "images", tmp_path / "images")
    value = yamlfile.load_yaml(ROOT / "matrix.yaml")
    like = {
        "runtime": "cuda",
        "version": "13.0",
        "python": ["3.12"],
        "os": ["debian12"],
        "wheels": ["upstream"],
    }
    value["stacks"].append(like | block)
    (tmp_path / "matrix.yaml").write_text(yaml.safe_dump(value))
    return tmp_path, says


def test_the_other_stacks_are_there(bad: tuple[Path, str]) -> None:
    root, _ = bad
    assert {stack.id for stack in resolve.load_stacks(root, ["cpu*"])} == {
        name for name in GOOD if name.startswith("cpu")
    }
    told: list[str] = []
    assert {stack.id for stack in resolve.load_stacks(root, refused=told.append)} == GOOD
    assert {stack.id for stack in resolve.usable(root)} == GOOD
    assert told


def test_the_refused_one_cannot_be_selected_and_names_its_row(bad: tuple[Path, str]) -> None:
    root, says = bad
    for selectors in ([], ["cuda13*"]):
        with pytest.raises(ConfigurationError, match=says):
            resolve.load_stacks(root, selectors)
