"""Which attention is asked for, and which really ran. In: a call that runs one microbatch. Out: names seen.

A fallback is silent and right in value; one published machine lost a factor of 1.9 forward and 4.6 backward.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from options import Options
    from world import World

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
# Names on the device, the first match decides: cuDNN's generated kernels say flash too, AOTriton serves
# `efficient` by the kernels of `flash`.
KERNELS = (
    ("cudnn", r"cudnn.*(sdpa|attention|flash|fprop|bprop)"),
    ("flash", r"flash_(fwd|bwd)|flash::|attn_fwd|attn_bwd|bwd_kernel_d|FmhaFwd|FmhaBwd"),
    ("efficient", r"fmha_cutlass[FB]"),
)
OPERATORS = (
    ("cudnn", r"_scaled_dot_product_cudnn_attention"),
    ("flash", r"_scaled_dot_product_flash_attention"),
    ("efficient", r"_scaled_dot_product_efficient_attention"),
    ("math", r"_scaled_dot_product_attention_math"),
)


@contextlib.contextmanager
def order(options: Options, world: World) -> Iterator[None]:
    """The order in which attention backends are tried. torch prefers its slower flash kernels on Hopper by
    default.
    """
    if not world.gpu or (options.attention == "auto" and torch.version.hip):
        yield
        return
    order = [BACKENDS[options.attention]] if options.attention != "auto" else list(BACKENDS.values())
    with _own_cache(order), sdpa_kernel(order, set_priority=True):
        yield


def _own_cache(order: list[SDPBackend]) -> contextlib.AbstractContextManager[object]:
    """Compiled graphs of this order alone. They hold the backend that was chosen when they were traced, and
    torch's cache does not tell orders apart: a job with flash got the graph with cuDNN of an earlier one.
    """
    config = getattr(torch.compiler, "config", None)  # torch 2.4 does not import it
    if not hasattr(config, "cache_key_tag"):  # torch before 2.6: nothing tells orders apart, so no cache
        from torch._inductor import config as inductor

        return inductor.patch(fx_graph_cache=False)
    tag = "attention=" + ",".join(backend.name for backend in order)
    return config.patch(cache_key_tag=tag)


def seen(microbatch: Callable[[], object], world: World) -> dict[str, Any]:
    """Run it under the profiler: {"backend", "operators", "kernels"}; kernels decide on a GPU."""
    gpu = [ProfilerActivity.CUDA] if world.gpu else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as trace:
        microbatch()
        world.synchronize()
    events = trace.events()
    kernels = {e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA}
    return chosen({e.name for e in events} - kernels, kernels, gpu=world.gpu)


def chosen(operators: set[str], kernels: set[str], *, gpu: bool) -> dict[str, Any]:
    """The backend by the names that ran, and which names said so. Pure.

    Kernels decide on a GPU. Where none has a known name (the formula in plain operations, or a library that
    calls its kernels otherwise) the operator that torch dispatched to does.
    """
    by_operator, by_kernel = _matching(operators, OPERATORS), _matching(kernels, KERNELS)
    by = "kernels" if gpu and by_kernel else "operators"
    names = sorted(by_kernel if by == "kernels" else by_operator, key=[name for name, _ in OPERATORS].index)
    return {
        "backend": "+".join(names) or None,
        "by": by,
        "operators": sorted(name for group in by_operator.values() for name in group),
        "kernels": sorted(name[:120] for group in by_kernel.values() for name in group),
    }


def _matching(names: set[str], table: tuple[tuple[str, str], ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in names:
        first = next((kind for kind, pattern in table if re.search(pattern, name, re.IGNORECASE)), None)
        if first is not None:
            found.setdefault(first, []).append(name)
    return found
