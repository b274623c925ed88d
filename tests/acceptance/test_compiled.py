"""Compiled code: torch.compile's models, and Triton's kernels. In: one device. Out: the cases that failed.

`test_kernels.py::test_compiled_block` has graph breaks and recompilation.
"""

import pytest

from harness import skips, unloaded
from harness.asked import of_image
from harness.calls import OnDevice, Passes
from harness.readings import only_with
from harness.session import AcceptanceSession
from workloads import compiled_gradients, compiled_models, grouped_gemm

TIMEOUT_S = 300


@pytest.mark.tier("standard")
@pytest.mark.long
@pytest.mark.gpus(1)
@pytest.mark.parametrize("family", compiled_models.FAMILIES)
def test_compiled_models(family: str, on_device: OnDevice, passes: Passes) -> None:
    """Compiled blocks of Llama, FLUX and a mixture of experts, at real width, are as exact as in eager mode:
    the output and every gradient.
    """
    if family == "moe":
        skips.if_lacking(on_device(grouped_gemm.lacks))
    passes(compiled_models.check, family=family, timeout_s=TIMEOUT_S)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_compiled_norms_sharing_a_table(passes: Passes) -> None:
    """Compiled LayerNorms in a chain have the right gradients.
    Their scales and shifts are slices of one table.
    """
    passes(compiled_gradients.norms, timeout_s=TIMEOUT_S)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
def test_compiled_sums_in_place(passes: Passes) -> None:
    """Compiled autograd functions whose result is summed in place keep their gradients."""
    passes(compiled_gradients.functions, timeout_s=TIMEOUT_S)


@pytest.mark.tier("standard")
@pytest.mark.gpus(1)
@pytest.mark.parametrize("group", ["products", "chains", "reductions"])
def test_triton_kernels(group: str, acceptance: AcceptanceSession, passes: Passes) -> None:
    """Triton's products, chains of products and reductions, launched in every tile, are right."""
    only_with(acceptance.vendor != "cpu", "gpu", "Triton kernels need a GPU")
    if not of_image(unloaded.is_installed, module="triton"):
        skips.without_package("triton", "Triton is not part of this stack")
    passes("workloads.triton_kernels:check", group=group, timeout_s=TIMEOUT_S)
