"""What the device's architecture offers. In: the visible device. Out: names and tables, no measurement."""

import torch

# Attention backends that PyTorch has kernels of, by how the architecture's name begins.
ATTENTION = {
    "cpu": ("math", "flash"),
    "gfx90a": ("math", "flash", "efficient"),
    "gfx94": ("math", "flash", "efficient"),
    "gfx95": ("math", "flash", "efficient"),
    "sm_8": ("math", "flash", "efficient", "cudnn"),
    "sm_9": ("math", "flash", "efficient", "cudnn"),
    "sm_1": ("math", "flash", "efficient", "cudnn"),
}
# AMD's first fp8 has another bias and no infinities or negative zero; later parts follow the OCP format.
FP8 = {
    "gfx94": "float8_e4m3fnuz",
    "gfx95": "float8_e4m3fn",
    "sm_89": "float8_e4m3fn",
    "sm_9": "float8_e4m3fn",
    "sm_1": "float8_e4m3fn",
}
TF32 = ("sm_8", "sm_9", "sm_1")


def name() -> str:
    """`gfx942`, `sm_90`, `cpu`."""
    if not torch.cuda.is_available():
        return "cpu"
    properties = torch.cuda.get_device_properties(0)
    gfx = str(getattr(properties, "gcnArchName", "")).split(":")[0]
    return gfx if gfx.startswith("gfx") else f"sm_{properties.major}{properties.minor}"


def attention_backends() -> tuple[str, ...]:
    """The backends that must work here. Raises `LookupError` for an architecture without a row."""
    for prefix, backends in ATTENTION.items():
        if name().startswith(prefix):
            return backends
    raise LookupError(f"no row for {name()} in workloads/arch.py ATTENTION: add its backends")


def fp8() -> torch.dtype | None:
    """The 8-bit float of this architecture's matrix units, or None where they have none."""
    found = [dtype for prefix, dtype in FP8.items() if name().startswith(prefix)]
    return getattr(torch, found[0]) if found else None


def has_tf32() -> bool:
    """Whether float32 products can be cut to TF32 by PyTorch's own switch."""
    return name().startswith(TF32)
