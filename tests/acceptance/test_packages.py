"""Packages beside torch that an image has: their layers run. In: one device. Out: the cases that failed."""

import pytest

from harness import skips
from harness.calls import OnDevice, Passes
from workloads import package_layers


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("package", sorted(package_layers.PACKAGES))
def test_package_layers(package: str, on_device: OnDevice, passes: Passes) -> None:
    """Layers of bitsandbytes, Liger, torchao and Transformer Engine are right forward and backward.
    Only packages that the image has are tried.
    """
    skips.if_lacking(on_device(package_layers.lacks, package=package))
    passes(package_layers.check, package=package, timeout_s=300)
