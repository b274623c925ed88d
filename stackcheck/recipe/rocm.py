"""What a ROCm image takes from AMD's own package archive, and which system libraries its wheels expect.

In: a stack. Out: where the archive of its ROCm release is, which packages come from there, and the values
that the templates take. Pure. Which wheel brings which library is data: images/rocm-libraries.yaml.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stackcheck.engine.apt import AptSource
from stackcheck.errors import ConfigurationError
from stackcheck.files import openpgp
from stackcheck.matrix.stack import Stack
from stackcheck.mirrors import Mirrors

# One archive a release, with Ubuntu's release names as suites: rocm.docs.amd.com/projects/install-on-linux,
# install/install-methods/package-manager/package-manager-ubuntu.
ARCHIVE = "https://repo.radeon.com/rocm/apt/{version}"
SUITES = {"ubuntu22.04": "jammy", "ubuntu24.04": "noble"}
# Where the same page puts the key that signs them.
KEY = Path("/etc/apt/keyrings/rocm.gpg")
KEY_ADDRESS = "https://repo.radeon.com/rocm/rocm.gpg.key"
# Of the one key in that file: ROCm/ROCm#854 shows it (of "ROCm Release Manager", renewed then), and public
# installers of ROCm 7.2 and 7.2.4 pin the same. Without it, any server at that address would be trusted.
FINGERPRINT = "CA8BB4727A47B4D09B4EE8969386B48A1A693C5C"
# libamd_smi.so and the Python module that belongs to it (ROCm/rocm-systems projects/amdsmi, CMakeLists.txt:
# CPACK_PACKAGE_NAME). Its files are taken, and no set-up script runs: at least up to 6.2 that calls pip for
# the system's Python (ROCm/amdsmi DEBIAN/postinst.in).
SMI = "amd-smi-lib"
# AMD's wheels of torch are "lw": they load ROCm from /opt/rocm, where PyTorch's own bring it along
# (LMCache/LMCache#4683; names such as torch-2.9.1+rocm7.2.4.lw.git39497456). What libtorch_hip needs of it is
# the list of pytorch/pytorch .ci/manywheel/repair_wheel.py; the packages that have it are
# https://rocm.docs.amd.com/projects/install-on-linux/en/latest/reference/package-manager-integration.html
RUNTIME = ("rocm-hip-libraries", "rocm-ml-libraries", "rocm-smi-lib", "roctracer")


def archive(stack: Stack) -> str:
    """The address of the archive of the stack's ROCm release; a release such as 7.2.0 is called 7.2 there."""
    return ARCHIVE.format(version=(stack.runtime_version or "").removesuffix(".0"))


def takes_smi(stack: Stack) -> bool:
    """Whether the management library comes from AMD's archive: later releases bring it as a wheel."""
    return stack.layout == "classic" and stack.torch is not None


def takes_runtime(stack: Stack) -> bool:
    """Whether torch's wheel leaves ROCm's libraries to the system."""
    return takes_smi(stack) and stack.wheels == "amd"


def suite(stack: Stack) -> str:
    """The archive's name for the stack's distribution.

    Raises:
        ConfigurationError: AMD has no packages for it, as far as this tool knows.
    """
    if stack.os not in SUITES:
        raise ConfigurationError(
            f"this tool knows no packages of AMD for {stack.os}",
            where=stack.id,
            expected=" or ".join(SUITES),
            next_step="choose another `os` in matrix.yaml",
        )
    return SUITES[stack.os]


def source(stack: Stack, mirrors: Mirrors) -> AptSource:
    """The archive, at the address and with the key that this site has for it, as apt takes it.

    Raises:
        ConfigurationError: The key that signs the archive is not on this host, or is not AMD's. A key that
            the mirrors name is the site's own choice, and may be any.
    """
    key = mirrors.key(archive(stack), KEY)
    if not key.is_file():
        raise ConfigurationError(
            "the key of AMD's package archive is not on this host",
            where=str(key),
            expected="the key, in the form that apt takes (Signed-By)",
            next_step=f"curl -fsSL {KEY_ADDRESS} | gpg --dearmor -o {KEY}, "
            "or name another file under `keys` of the mirrors",
        )
    if key == KEY:
        _require_key_of_amd(key)
    return AptSource(
        uris=(mirrors.url(archive(stack)),), suites=(suite(stack),), components=("main",), signed_by=str(key)
    )


def _require_key_of_amd(key: Path) -> None:
    try:
        found = openpgp.fingerprints(key.read_bytes())
        got = ", ".join(sorted(found)) or "no key"
    except ValueError as error:
        found, got = frozenset(), str(error)
    if found != {FINGERPRINT}:
        raise ConfigurationError(
            "the file must hold the key of AMD's package archive and no other",
            where=str(key),
            got=got,
            expected=FINGERPRINT,
            next_step=f"remove it and get it from {KEY_ADDRESS}; if AMD has a new key, or your mirror signs"
            " with its own, name the file under `keys` of the mirrors",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromArchive:
    """What the templates take: `packages` into the base, `smi` into a stage of its own."""

    archive: str
    suite: str
    place: str  # the folder of the release: /opt/rocm-7.2.4
    packages: tuple[str, ...]
    linked: bool  # whether /opt/rocm has to be made; ROCm's own packages make it


def template_values(stack: Stack) -> Mapping[str, Any]:
    """What the templates ask for about AMD's archive."""
    if not takes_smi(stack):
        return {"rocm": None}
    packages = RUNTIME if takes_runtime(stack) else ()
    found = FromArchive(
        archive=archive(stack),
        suite=suite(stack),
        place=f"/opt/rocm-{stack.runtime_version}",
        packages=packages,
        linked=not packages,
    )
    return {"rocm": found}
