"""Readings as JSON. In: what a vendor's module returns. Out: text, and from it the same values.

The process that reads a device is a program of the image, so nothing that could run code comes back from it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import vendors
from vendors import Absence, VendorAbsentError

KIND = "!"  # no field can have this name
CLASSES = {
    one.__name__: one
    for one in (
        *(vendors.Host, vendors.Device, vendors.Link, vendors.Sample, vendors.PcieLink, vendors.Ecc),
        *(vendors.Throttle, vendors.Power, vendors.Process),
    )
}
TEXTS: Mapping[str, Any] = {
    "Absence": Absence,
    "VendorAbsentError": VendorAbsentError,
    "RuntimeError": RuntimeError,
}


def encoded(value: object) -> Any:
    """A value that json can write."""
    if isinstance(value, Absence | VendorAbsentError | RuntimeError):
        return {KIND: next(name for name, one in TEXTS.items() if isinstance(value, one)), "text": str(value)}
    if dataclasses.is_dataclass(value):
        fields = {field.name: encoded(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {KIND: type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {KIND: "Mapping", "items": [[key, encoded(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    return value


def decoded(value: Any) -> Any:
    """What `encoded` wrote. Raises `ValueError`, `TypeError` or `KeyError` for anything else."""
    if isinstance(value, list):
        return tuple(decoded(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.pop(KIND)
    if kind in TEXTS:
        return TEXTS[kind](str(value["text"]))
    if kind == "Mapping":
        return {str(key): decoded(item) for key, item in value["items"]}
    return CLASSES[kind](**{name: decoded(item) for name, item in value.items()})
