"""Whole weights go to a file and back one at a time, in the form that the library reads; a broken file is
refused.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from agree import same_bits
from held import Held

import whole
from conftest import Record
from errors import RefusedError

WEIGHTS = {
    "b": torch.randn(3, 5),
    "empty": torch.zeros(0, 4),
    "a": torch.randn(7),
    "scalar": torch.tensor(2.0),
}
SHAPES = {name: value.shape for name, value in WEIGHTS.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    whole.write(tmp_path / "w.safetensors", SHAPES, WEIGHTS.items())
    return tmp_path / "w.safetensors"


def test_weights_come_back_as_they_were(path: Path) -> None:
    same_bits(whole.read(path), WEIGHTS)


def test_the_library_reads_ours_and_we_read_the_librarys(path: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    same_bits(library.load_file(path), WEIGHTS)
    mixed: dict[str, Any] = {
        "odd": torch.ones(3, dtype=torch.uint8),
        "half": torch.randn(5).bfloat16(),
        **WEIGHTS,
    }
    library.save_file(mixed, tmp_path / "mixed.safetensors")
    same_bits(whole.read(tmp_path / "mixed.safetensors"), mixed)


@pytest.mark.parametrize("kept", [0, 4, 8, 40, -1, -4])
def test_a_file_that_is_cut_off_is_refused(kept: int, path: Path) -> None:
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RefusedError, match="no whole file of safetensors"):
        whole.read(path)


def test_one_weight_is_held_at_a_time(tmp_path: Path) -> None:
    def made() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(20):
            yield f"{number:02}", torch.ones(1000)

    with Held() as held:
        whole.write(tmp_path / "w.safetensors", {f"{number:02}": (1000,) for number in range(20)}, made())
    assert held.peak <= 2 * 4000


def test_weights_in_another_order_than_their_shapes_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="is not b"):
        whole.write(tmp_path / "w.safetensors", SHAPES, reversed(WEIGHTS.items()))


LAYOUTS = [
    (2, ()),
    (2, ("--parallel", "full_shard")),
    (2, ("--parallel", "zero1")),
    (2, ("--pp", "2")),
    (2, ("--tp", "2")),
]


def test_every_layout_has_the_same_weights_in_the_same_order_and_file(tmp_path: Path, record: Record) -> None:
    job = ("--steps", "1", "--global-batch", "8", "--micro-batch", "4", "--device", "cpu", "--lr", "0")
    want = record(1, *job, "--checkpoint", str(tmp_path / "want"))
    first = whole.read(tmp_path / "want/step_00000001/weights.safetensors")
    assert list(first) == sorted(first)
    for number, (ranks, flags) in enumerate(LAYOUTS):
        got = record(ranks, *job, *flags, "--checkpoint", str(tmp_path / str(number)))
        assert got["digest"] == want["digest"], flags
        same_bits(whole.read(tmp_path / f"{number}/step_00000001/weights.safetensors"), first)
