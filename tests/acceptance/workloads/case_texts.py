"""A drawn case from its text. In: JSON, and what each place of it may hold. Out: values, or `CaseError`."""

import argparse
import json
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

Check = Callable[[Any, str], Any]  # a value and its place in the text -> what the case gets


class CaseError(argparse.ArgumentTypeError):
    """A text that is no case: the place, what was got there, and what is expected."""


def refuse(place: str, got: Any, expected: str) -> NoReturn:
    """Raise `CaseError`."""
    raise CaseError(f"{place}: got {got!r}, expected {expected}")


def parsed(text: str, check: Check) -> Any:
    """What the check makes of a text."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CaseError(f"case: got {text!r}, expected JSON: {error}") from error
    return check(value, "case")


def one_of(*known: Any) -> Check:
    """One of these values, and of its type: 1 is not true."""
    plain = json.loads(json.dumps(known))

    def check(value: Any, place: str) -> Any:
        if not any(value == one and type(value) is type(one) for one in plain):
            refuse(place, value, f"one of {json.dumps(plain)[1:-1]}")
        return value

    return check


def whole(least: int, most: int | None = None) -> Check:
    """A whole number between two, or from one on."""

    def check(value: Any, place: str) -> Any:
        if type(value) is not int or value < least or (most is not None and value > most):
            refuse(place, value, f"a whole number from {least} {'on' if most is None else f'to {most}'}")
        return value

    return check


def listed(check: Check, least: int = 0) -> Check:
    """A list of so many of one kind, or more."""

    def every(value: Any, place: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) < least:
            refuse(place, value, f"a list of {least} or more")
        return tuple(check(one, f"{place}[{number}]") for number, one in enumerate(value))

    return every


def named(made: Callable[..., Any], needed: Mapping[str, Check], others: Mapping[str, Check]) -> Check:
    """An object with the needed names, and of the others any."""
    known = {**needed, **others}

    def check(value: Any, place: str) -> Any:
        if not isinstance(value, dict) or not needed.keys() <= value.keys() <= known.keys():
            words = f", and any of {sorted(others)}" if others else ""
            got = sorted(value) if isinstance(value, dict) else value
            refuse(place, got, f"an object with {sorted(needed)}{words}")
        return made(**{name: known[name](one, f"{place}.{name}") for name, one in value.items()})

    return check
