"""An image of a few kilobytes, published by one key into a layout on disk."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any

import pytest

from small_images import NOW, STACK_ID, certify, make_image, new_key, quiet
from stackcheck.certificate import publish, verify

if TYPE_CHECKING:
    from pathlib import Path

    from small_images import SmallImage

KEY = new_key()
DAY = dt.timedelta(days=1)


@pytest.fixture(name="image")
def image_of_a_few_kilobytes(tmp_path: Path) -> SmallImage:
    return make_image(tmp_path / "oci")


@pytest.fixture(name="dist")
def layout_with_that_image(tmp_path: Path, image: SmallImage) -> Path:
    release(image, tmp_path / "dist")
    return tmp_path / "dist"


def release(image: SmallImage, dist: Path, **changes: Any) -> None:
    publish.publish(
        image.layout,
        tag=STACK_ID,
        envelopes=certify(image, KEY, **changes),
        target=f"oci:{dist}",
        public_key=KEY.public_key(),
        report=quiet,
    )


def verified(dist: Path, **changes: Any) -> verify.Verified:
    arguments: dict[str, Any] = {
        "public_key": KEY.public_key(),
        "device_model": "CPU",
        "driver": None,
        "now": NOW + DAY,
    }
    return verify.verify(f"oci:{dist}:{STACK_ID}", **(arguments | changes))
