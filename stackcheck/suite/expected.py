"""The checks that a run must hold. In: tests/acceptance/checks.json of this checkout. Out: their ids.

The list is committed, and a test of the suites keeps it equal to what they collect. So a check that an image
drops, renames or deselects is missing from its result, and an added one is seen in review.
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from stackcheck.errors import ConfigurationError
from stackcheck.policy import Tier, is_enough
from stackcheck.vendors import Vendor

GATE = "gate"  # the list of the checks that `stackcheck gate` runs, of every tier and number of devices
_IN_K = re.compile(r"[\w:+\-./\[\]]+")  # what stands in pytest's -k without being read as an operator
_LISTING = TypeAdapter(dict[str, dict[str, Tier]])


def check_ids(root: Path, *, vendor: Vendor, tier: Tier, count: int) -> tuple[str, ...]:
    """The ids of all checks of a tier and the lower ones, sorted; some depend on the number of devices.

    Raises:
        ConfigurationError: The file is missing or malformed, or has no list for this number of devices.
    """
    path = root / "tests" / "acceptance" / "checks.json"
    try:
        listing = _LISTING.validate_json(path.read_bytes(), strict=True)
    except (OSError, ValidationError) as error:
        raise ConfigurationError(
            "cannot read the list of checks",
            where=str(path),
            got=str(error).splitlines()[0],
            next_step="run stackcheck in its checkout, or name it with --root",
        ) from error
    key = "cpu" if vendor == "cpu" else str(count)
    if key not in listing:
        raise ConfigurationError(
            "there is no list of checks for this number of devices",
            where=str(path),
            got=f"{count} devices",
            expected=", ".join(name for name in listing if name.isdecimal()),
            next_step="test fewer devices, or add the count in tests/faults/test_expected_checks.py",
        )
    tiers = listing["every"] | listing[key]
    if tier == GATE:
        return tuple(sorted(name for name in tiers if name in listing[GATE]))
    return tuple(sorted(name for name, first in tiers.items() if is_enough(tier, first)))


@functools.lru_cache(maxsize=64)
def digest(ids: tuple[str, ...]) -> str:
    """`sha256:…` of the ids, in the form that a certificate names."""
    return "sha256:" + hashlib.sha256(json.dumps(ids).encode()).hexdigest()


def expression(ids: Iterable[str]) -> str:
    """The ids as pytest's -k; parameters that it could not hold are left out, so that all of a check run."""
    terms = set()
    for each in ids:
        file, _, name = each.partition("::")
        whole = name if _IN_K.fullmatch(name) else name.partition("[")[0]
        terms.add(f"({file} and {whole})")
    return " or ".join(sorted(terms))
