"""`certificate.verify.verify` with the host and its reader's terms as keywords, as most tests state them."""

import dataclasses
from typing import Any

from stackcheck.certificate import verify
from stackcheck.certificate.for_host import Wanted

OF_THE_HOST = {field.name for field in dataclasses.fields(Wanted)}


def verified(reference: str, **told: Any) -> verify.Verified:
    """The image, certified for the host that the keywords state: without them, one that has no GPU."""
    host = {name: told.pop(name) for name in OF_THE_HOST & set(told)}
    return verify.verify(reference, Wanted(**({"device_model": "CPU", "driver": None} | host)), **told)
