"""An image of a few kilobytes, published by one key into a layout on disk."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import asked
from small_images import NOW, STACK_ID, SmallImage, certify, new_key, quiet
from stackcheck.certificate import publish, verify

KEY = new_key()
DAY = dt.timedelta(days=1)


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
    return asked.verified(f"oci:{dist}:{STACK_ID}", **(arguments | changes))
