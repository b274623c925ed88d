"""A name that stands for nothing, or for nothing yet, leads to the command that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from small_checkout import CPU_STACK, call
from stackcheck.oci import tags
from stackcheck.oci.store import is_tag
from stackcheck.oci.tags import label

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]


@pytest.mark.usefixtures("fake_engine")
def test_an_image_outlives_its_stack(small_checkout: Path, capsys: Capsys) -> None:
    call(capsys, "build", CPU_STACK)
    (small_checkout / "matrix.yaml").unlink()
    assert call(capsys, "export", CPU_STACK, "--dry-run").code == 0


def test_no_reference_takes_the_folder_or_the_tag_of_a_stack_or_of_another_reference() -> None:
    names = [CPU_STACK, CPU_STACK.replace("-debian12", ":debian12"), CPU_STACK.replace("-torch", "/torch")]
    labels = [label(name) for name in names]
    assert labels[0] == CPU_STACK
    assert len(set(labels)) == len(names)
    assert all(is_tag(item) for item in (*labels, label(f"registry.example.org/{'a' * 200}:1")))
    assert [tags.names(item, item, None) for item in labels] == [False, True, True]


def test_the_tag_of_a_reference_is_never_read_as_one_that_stays() -> None:
    # Among so many hashes some are digits alone, as the number of a unique tag is.
    for number in range(1000):
        found = label(f"registry.example.org/pytorch{number}:nightly-20250101")
        assert tags.names(found, found, None)
        assert not tags.is_unique(found)
        assert tags.floating(f"{found}-20250102-1.0123abcd") == found
