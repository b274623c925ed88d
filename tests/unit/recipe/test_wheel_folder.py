"""A lock of one folder of wheels: the folder's own hashes, or a refusal that names what is absent."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from small_wheels import make_wheel
from stackcheck.errors import BuildError
from stackcheck.recipe.lock import WheelFolder


def test_a_lock_has_the_hashes_of_the_files_and_what_is_absent_is_named(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "house", word="one")
    house = WheelFolder(wheel.parent)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    text = house.resolve(["small-package==1.0"], python="3.12")
    assert text == f"small-package==1.0 \\\n    --hash=sha256:{digest}\n"
    assert house.files(["small-package==1.0"]) == {"small-package==1.0": {wheel.name: digest}}
    with pytest.raises(BuildError, match="lacks packages of the stack") as caught:
        house.resolve(["small-package==1.0", "absent-one==2"], python="3.12")
    assert "absent-one" in str(caught.value.got)
    assert str(wheel.parent) in str(caught.value.next_step)
