"""An image of a few kilobytes, published by one key into a layout on disk."""

import datetime as dt
from pathlib import Path
from typing import Any

import asked
import small_images
from small_images import NOW, STACK_ID, SmallImage, new_key
from stackcheck.certificate import verify

KEY = new_key()
DAY = dt.timedelta(days=1)


def release(image: SmallImage, dist: Path, **changes: Any) -> None:
    small_images.release(image, dist, KEY, **changes)


def verified(dist: Path, **changes: Any) -> verify.Verified:
    told = {"public_key": KEY.public_key(), "now": NOW + DAY} | changes
    return asked.verified(f"oci:{dist}:{STACK_ID}", **told)
