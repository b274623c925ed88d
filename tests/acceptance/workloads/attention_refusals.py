"""What an attention backend may refuse. In: a backend and a problem. Out: the documented reason, or nothing.

A refusal without a reason here is a fault of the image. Source: the filters of each backend in PyTorch's
aten/src/ATen/native/transformers/cuda/sdp_utils.cpp and sdp_utils_cpp.cpp, releases 2.5 to 2.13.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from workloads import arch

if TYPE_CHECKING:
    from workloads.attention import Shape

NO_KERNEL = ("No available kernel", "No viable backend")
Refuses = Callable[["Shape", bool], bool]


def release() -> tuple[int, int]:
    """PyTorch's release: (2, 13)."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


# backend: (reason, whether it holds for this shape, with or without a mask)
MAY_REFUSE: Mapping[str, tuple[tuple[str, Refuses], ...]] = {
    "math": (),
    "flash": (
        ("flash attention on GPUs takes no mask", lambda _, masked: masked and arch.name() != "cpu"),
        (
            "its causal diagonal is at the other corner if lengths differ",
            lambda shape, _: shape.causal and shape.sq != shape.sk,
        ),
        ("heads of more than 256", lambda shape, _: shape.d > 256),
        (
            "training with heads of more than 192 on sm_86, sm_89 and sm_12x",
            lambda shape, _: shape.d > 192 and arch.name().startswith(("sm_86", "sm_89", "sm_12")),
        ),
    ),
    "efficient": (
        ("heads that are no multiple of 8", lambda shape, _: shape.d % 8 != 0),
        ("fewer key heads than query heads", lambda shape, _: shape.hq != shape.hkv),
    ),
    "cudnn": (
        ("heads that are no multiple of 8", lambda shape, _: shape.d % 8 != 0),
        ("heads of more than 128", lambda shape, _: shape.d > 128),
        ("one key", lambda shape, _: shape.sk == 1),
        ("masks before PyTorch 2.6", lambda _, masked: masked and release() < (2, 6)),
    ),
}


def reason(backend: str, shape: "Shape", *, masked: bool = False) -> str:
    """The documented reason for which this backend may refuse the problem; empty if it must not."""
    return next((words for words, holds in MAY_REFUSE[backend] if holds(shape, masked)), "")


def refused(backend: str, shape: "Shape", attempt: Callable[[], object], *, masked: bool = False) -> bool:
    """Whether the backend refuses the attempt. Raises `AssertionError` if it must not refuse it."""
    try:
        attempt()
    except RuntimeError as error:
        if not any(words in str(error) for words in NO_KERNEL):
            raise
        if not reason(backend, shape, masked=masked):
            with_mask = " with a mask" if masked else ""
            raise AssertionError(
                f"{backend} attention refuses {shape}{with_mask}, which it must support: {error}"
            ) from error
        return True
    return False
