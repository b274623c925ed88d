"""No GPU: the host's processor counts as a device, so that the whole flow runs anywhere.

In: the host. Out: one device of model CPU; a container needs nothing for it.
"""

import platform
from collections.abc import Mapping, Sequence

import psutil

from stackcheck.vendors import ContainerNeeds, HostDevice, LaunchWords, anonymous_id, cpu_model


def present() -> bool:
    """A processor is always there."""
    return True


def driver() -> str | None:
    """A processor has no driver."""
    return None


def kernel_module() -> str | None:
    """A processor has no driver, so no module of one."""
    return None


def devices() -> tuple[HostDevice, ...]:
    """The processor as one device of model CPU."""
    arch = platform.machine()
    identity = anonymous_id(f"{arch} {cpu_model()} x {psutil.cpu_count()}")
    # 0: there is no device memory apart from the host's, which `Host.memory_bytes` gives.
    return (HostDevice(model="CPU", arch=arch, id=identity, memory_bytes=0),)


def addresses() -> Mapping[str, str]:
    """A processor is no PCI device."""
    return {}


def busy() -> Mapping[str, float | None]:
    """Nobody claims a processor's speed."""
    return {}


def partition() -> str | None:
    """There is nothing to partition."""
    return None


def container_needs() -> ContainerNeeds:
    """Nothing."""
    return ContainerNeeds(remark="no device: this stack runs on the processor")


def launch_words() -> LaunchWords:
    """Nothing."""
    return LaunchWords()


def visibility() -> Mapping[str, str | None]:
    """No variable hides a processor."""
    return {}


def kernel_files(archs: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """A processor's packages hold no kernels."""
    del archs
    return (), ()
