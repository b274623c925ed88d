"""Whether this host's own data confirm a skip. In: a skip's facts, devices, the stack. Out: a problem.

The image under test writes the skip, so its reason is only a claim. devices.json of this checkout lists what
a model may lack, the host counts its own devices, and the stack declares what its image holds. Pure.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from stackcheck.matrix.stack import Stack

GIB = 2**30
USABLE = 0.97  # of a device's nominal memory: the driver and a context keep some for themselves
NO_DECLARATION = "declaration"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What this host knows of a run, apart from its result.

    Attributes:
        rows: The rows of devices.json for the device models of this host, one for each device.
        packages: Normalised package -> version that the stack declares; None for an image without a stack,
            which declares nothing.
        unreadable: What this machine and the image's library cannot tell (`unreadable.readings`).
    """

    rows: Sequence[Mapping[str, Any]]
    packages: Mapping[str, str] | None = None
    archs: Sequence[str] = field(default_factory=tuple)  # the architectures that the stack declares
    unreadable: Collection[str] = ()


def declared(stack: Stack) -> dict[str, str]:
    """Normalised package -> version of everything that a stack's image holds."""
    found = {}
    for requirement in stack.requirements:
        name, _, version = requirement.partition("==")
        found[name.lower().replace("_", "-")] = version
    if stack.torch:
        found["torch"] = stack.torch
    if stack.triton:
        found["triton"] = stack.triton.version
    if stack.flash_attn:
        found["flash-attn"] = stack.flash_attn.version
        # FlashAttention 4 compiles its kernels when they are first called.
        if stack.flash_attn.backend != "triton" and stack.flash_attn.form != "index":
            found["flash-attn extension"] = stack.flash_attn.version
    return found


def problem(skip: Mapping[str, Any] | None, facts: Facts) -> str | None:
    """Why a skip is not accepted; None if this host's data confirm it."""
    if skip is None:
        return "the skip states no kind"
    needs = skip.get("needs") or {}
    if skip.get("kind") == "not on this device":
        return _of_device(needs, facts)
    if skip.get("kind") == "not in this stack":
        return _of_stack(needs, facts)
    reading = needs.get("reading")
    if not reading or not facts.rows:
        return f"this host knows no device whose {reading!r} could be unreadable"
    if reading in facts.unreadable or all(reading in row.get("unreadable", ()) for row in facts.rows):
        return None
    return f"devices.json does not list {reading!r} as unreadable on {_models(facts)}, driver and library"


def _of_device(needs: Mapping[str, Any], facts: Facts) -> str | None:
    if count := needs.get("devices"):
        return (
            None if len(facts.rows) < count else f"this host has {len(facts.rows)} devices, it needs {count}"
        )
    if memory := needs.get("memory_gib"):
        least = min((row["memory_bytes"] for row in facts.rows), default=0) / GIB
        usable = USABLE * least
        return None if usable < memory else f"each device has {least:.0f} GiB, it needs {memory} GiB"
    feature = needs.get("feature")
    if feature and facts.rows and all(feature in row["lacks"] for row in facts.rows):
        return None
    return f"devices.json does not list {feature!r} under what {_models(facts)} lacks"


def _of_stack(needs: Mapping[str, Any], facts: Facts) -> str | None:
    if facts.packages is None:
        return None  # an image without a stack declares nothing that could be missing
    if arch := needs.get("arch"):
        return None if arch not in facts.archs else f"the stack declares {arch}"
    name = str(needs.get("package", ""))
    if name == "torch":
        return "a stack without torch is never certified for training"
    if not name or name == NO_DECLARATION:
        return "an image of a stack carries its declaration, and a skip names what is absent"
    version = facts.packages.get(name) or _fitting(name, facts.packages)
    return f"the stack declares {name} {version}" if version else None


def _fitting(requirement: str, packages: Mapping[str, str]) -> str | None:
    """The declared version that meets a requirement such as `torch>=2.13`."""
    try:
        wanted = Requirement(requirement)
    except InvalidRequirement:
        return None
    version = packages.get(wanted.name.lower())
    return version if version and wanted.specifier.contains(version, prereleases=True) else None


def _models(facts: Facts) -> str:
    return " and ".join(sorted({str(row["model"]) for row in facts.rows})) or "this host"
