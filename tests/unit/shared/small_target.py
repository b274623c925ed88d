"""A target on disk, the key that signs for it, and images of a few kilobytes to publish there."""

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

import asked
from small_images import NOW, STACK_ID, SmallImage, make_image, new_key, quiet, release, tags_of
from stackcheck.certificate import publish, revoke, verify
from stackcheck.errors import PublishError, StackcheckError
from stackcheck.oci.documents import RegistryError

HOUR = dt.timedelta(hours=1)


class Publisher:
    """A key, a target, and images to publish there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.key: EllipticCurvePrivateKey = new_key()
        self.target = f"oci:{folder / 'dist'}"
        self.reference = f"{self.target}:{STACK_ID}"

    def image(self, content: bytes) -> SmallImage:
        return make_image(self.folder / content.decode(), content)

    def publish(self, image: SmallImage, **changes: Any) -> publish.Published:
        return release(image, self.folder / "dist", self.key, **changes)

    def revoke(self, reference: str, now: dt.datetime = NOW + HOUR) -> revoke.Revoked:
        return revoke.revoke(reference, reason="NaN", key=self.key, now=now, report=quiet)

    def verify(
        self, reference: str | None = None, now: dt.datetime = NOW + 3 * HOUR, **host: Any
    ) -> verify.Verified:
        return asked.verified(reference or self.reference, public_key=self.key.public_key(), now=now, **host)

    def tags(self) -> dict[str, str]:
        return tags_of(self.folder / "dist")


def refused(publisher: Publisher, image: SmallImage, **changes: Any) -> StackcheckError:
    with pytest.raises((PublishError, RegistryError)) as error:
        publisher.publish(image, **changes)
    assert error.value.exit_code == 8
    return error.value
