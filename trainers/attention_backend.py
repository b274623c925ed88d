"""Which attention backend torch may use, and which one really ran. In: a call of one microbatch. Out: names.

torch falls back to a slower backend silently and with correct values; one published machine lost a factor of
1.9 in forward and 4.6 in backward.
"""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import flash4
from errors import RefusedError

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
# Names of kernels; the first match decides. cuDNN's generated kernels have "flash" in their names too, and
# AOTriton serves `efficient` with the kernels of `flash`.
KERNELS = (
    ("fa4", r"flash_?attn_?cute|FlashAttention(Forward|Backward)"),
    ("cudnn", r"cudnn.*(sdpa|attention|flash|fprop|bprop)"),
    ("flash", r"flash_(fwd|bwd)|flash::|attn_fwd|attn_bwd|bwd_kernel_d|FmhaFwd|FmhaBwd"),
    ("efficient", r"fmha_cutlass[FB]"),
)
OPERATORS = (
    ("fa4", r"trainers::fa4"),
    ("cudnn", r"_scaled_dot_product_cudnn_attention"),
    ("flash", r"_scaled_dot_product_flash_attention|_varlen_attn"),
    ("efficient", r"_scaled_dot_product_efficient_attention"),
    ("math", r"_scaled_dot_product_attention_math"),
)


@contextlib.contextmanager
def order(options: Options, world: World) -> Iterator[None]:
    """Set the order in which torch tries attention backends.

    By default it takes its slower flash kernels on Hopper.
    """
    if not world.gpu or (options.attention == "auto" and torch.version.hip):
        yield
        return
    if options.attention == "fa4":
        require_fa4()
    named = options.attention if options.attention in BACKENDS else None
    order = [BACKENDS[named]] if named else list(BACKENDS.values())
    fa4 = flash4.chosen() if options.attention == "fa4" else contextlib.nullcontext()
    names = [options.attention] if options.attention == "fa4" else [backend.name for backend in order]
    with _own_cache(names), sdpa_kernel(order, set_priority=True), fa4:
        yield


def require_fa4() -> None:
    """Refuse `--attention fa4` where it cannot run."""
    if torch.version.hip:
        raise RefusedError("--attention fa4 is for NVIDIA GPUs; use --attention auto")
    if not flash4.installed():
        raise RefusedError(
            "--attention fa4 needs the packages flash-attn-4 and nvidia-cutlass-dsl, and one is absent; "
            "use an image of a stack with `flash_attn: 4…`, or --attention auto"
        )


def _own_cache(names: list[str]) -> contextlib.AbstractContextManager[object]:
    """Compiled graphs of this order only.

    A graph contains the backend that was chosen when it was traced, and the key of torch's cache does not: a
    job with flash got the graph of an earlier job with cuDNN.
    """
    own: contextlib.AbstractContextManager[object]
    config: Any = getattr(torch.compiler, "config", None)  # torch 2.4 does not import it
    if hasattr(config, "cache_key_tag"):
        own = config.patch(cache_key_tag="attention=" + ",".join(names))
    else:  # before torch 2.6 the key cannot be changed, so there is no cache
        from torch._inductor import config as inductor

        own = inductor.patch(fx_graph_cache=False)
    return own


def seen(microbatch: Callable[[], object], world: World) -> dict[str, Any]:
    """Run the microbatch under the profiler; the answer of `chosen`."""
    gpu = [ProfilerActivity.CUDA] if world.gpu else []
    with profile(activities=[ProfilerActivity.CPU, *gpu]) as trace:
        microbatch()
        world.synchronize()
    events = trace.events()
    kernels = {e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA}
    return chosen({e.name for e in events} - kernels, kernels, gpu=world.gpu)


def chosen(operators: set[str], kernels: set[str], *, gpu: bool) -> dict[str, Any]:
    """The backend that ran: {"backend", "by", "operators", "kernels"}, with the names that show it. Pure.

    On a GPU the kernels decide. Where no kernel has a known name (plain operations, or a library with other
    names), the operator that torch dispatched to decides.
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
