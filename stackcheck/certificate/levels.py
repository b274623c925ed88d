"""The levels that a certificate has, for readers that compare words alone, as cosign and Kyverno do.

In: what a certificate states about device models, tier and bounds. Out: names such as STACKCHECK_H200_X8.
They are SLSA's custom levels: https://slsa.dev/spec/v1.2/verification_summary.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from stackcheck.certificate.summary import CERTIFIED_LEVEL
from stackcheck.suite.bounds import CLASSES

PACKAGED_PYTHON = "PYTHON_PACKAGED"  # the level of an image whose Python a package of it owns


def levels(certificate: Mapping[str, Any]) -> list[str]:
    """The levels of a PASSED summary:
    tier, weakest class of bounds, and each architecture and device model, also with how many were tested
    together (STACKCHECK_H200 and STACKCHECK_H200_X8).
    """
    devices = certificate["host"]["devices"]
    names = {name for device in devices for name in (device["arch"], device["model"]) if name}
    counts = Counter(device["model"] for device in devices)
    names |= {f"{model}_X{count}" for model, count in counts.items()}
    weakest = next((name for name in reversed(CLASSES) if name in certificate["bounds"]), "none")
    names |= {f"TIER_{certificate['run']['tier']}", f"BOUNDS_{weakest}"}
    python = certificate.get("python")
    names |= {PACKAGED_PYTHON} if python and python["package"] else set()
    return [CERTIFIED_LEVEL, *sorted(map(level_name, names))]


def level_name(name: str) -> str:
    """How a level spells a model, an architecture, a tier or a class of bounds."""
    return "STACKCHECK_" + re.sub(r"[^A-Z0-9]+", "_", name.upper()).strip("_")
