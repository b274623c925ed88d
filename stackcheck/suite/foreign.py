"""Known issues of an image that was not built here. In: its SBOM, the host. Out: the issues of its versions.

A version that the SBOM does not name hits no issue: what an image does not say is judged by its checks alone.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from stackcheck.matrix import known_issues
from stackcheck.matrix.known_issues import KnownIssue
from stackcheck.vendors import Host

# Axis of known-issues.yaml -> the distributions that carry it.
DISTRIBUTIONS = {
    "torch": r"torch",
    "triton": r"triton|triton-rocm|pytorch-triton|pytorch-triton-rocm",
    "flash_attn": r"flash-attn(-[0-9]+)?",
    "nccl": r"nvidia-nccl-cu[0-9]+",
    "amdsmi": r"amdsmi",
    "cuda": r"nvidia-cuda-runtime(-cu[0-9]+)?",
    "rocm": r"rocm-sdk-core",
}
# What a wheel of torch says of itself: `+cu130`, `+rocm6.4`.
BUILT_FOR = re.compile(r"\+(cu|rocm)([0-9]+(?:\.[0-9]+)*)")


def issues(document: Mapping[str, Any], host: Host, root: Path) -> tuple[KnownIssue, ...]:
    """The known issues of the versions in an SBOM, on the devices and with the driver of a host."""
    found = known_issues.load_known_issues(root / "images" / "known-issues.yaml")
    values = {"vendor": host.vendor, **dict(versions(document))}
    return found.of(values, dict.fromkeys(device.arch for device in host.devices), (host.driver,))


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """What differs between the packages of two SBOMs: `torch 2.9.0 -> 2.10.0`, `+ x 1.0`, `- y 2.0`."""
    old, new = _packages(before), _packages(after)
    differing = (name for name in sorted(old.keys() | new.keys()) if old.get(name) != new.get(name))
    return tuple(_change(name, old.get(name), new.get(name)) for name in differing)


def _change(name: str, before: str | None, after: str | None) -> str:
    if before is None:
        return f"+ {name} {after}"
    return f"- {name} {before}" if after is None else f"{name} {before} -> {after}"


def _packages(document: Mapping[str, Any]) -> dict[str, str]:
    """Each package with its versions: an image may hold two of a name."""
    found: dict[str, list[str]] = {}
    for item in document["components"]:
        if item.get("purl"):
            found.setdefault(str(item["name"]), []).append(str(item.get("version", "")))
    return {name: ", ".join(sorted(set(versions))) for name, versions in found.items()}


def versions(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each axis that the Python packages of an SBOM name, with its version; what torch says counts last."""
    listed = {
        str(item["name"]).lower().replace("_", "-"): str(item.get("version", ""))
        for item in document["components"]
        if "pkg:pypi/" in str(item.get("purl", ""))
    }
    for axis, names in DISTRIBUTIONS.items():
        yield from ((axis, version) for name, version in listed.items() if re.fullmatch(names, name))
    if built := BUILT_FOR.search(listed.get("torch", "")):
        runtime, version = built.groups()
        if runtime == "cu":
            yield "cuda", f"{version[:-1]}.{version[-1]}"
        else:  # without a patch it may be any: the first one has the most faults
            yield "rocm", version if version.count(".") > 1 else f"{version}.0"
