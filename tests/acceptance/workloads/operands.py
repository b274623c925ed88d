"""Input data that makes numeric faults visible. In: shapes, seeds. Out: seeded tensors.

Never uniform(0, 1): its mean dominates every sum. With it, attention that loses 16 of 1024 keys has only
1.9 times the error of a healthy low-precision kernel; with normal inputs it has 25 times, with a peaked
softmax 51 times.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from workloads import device

GUARD = 64
BLOCKS = 4  # of freed memory for each tensor: those that come between take some
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def generator(seed: int, on: torch.device | None = None) -> torch.Generator:
    """A new generator, so that the data of a case never depend on the cases before it."""
    return torch.Generator(on or device()).manual_seed(seed)


def gradient(leaf: torch.Tensor, name: str) -> torch.Tensor:
    """The gradient in a leaf after a backward pass. Raises `AssertionError` if the leaf has no gradient."""
    if leaf.grad is None:
        raise AssertionError(f"{name} is missing: the backward wrote no gradient")
    return leaf.grad


def with_gradients(
    call: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor], g: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """The output of a call of these tensors, and the gradient of each, which an error calls by its name.

    `g` is the output's gradient; a loss needs none.
    """
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors.values()]
    out = call(*leaves)
    out.backward(g)
    return (out.detach(), *map(gradient, leaves, tensors))


def normal(*shape: int, dtype: torch.dtype, seed: int, scale: float = 1.0) -> torch.Tensor:
    """N(0, scale), rounded to `dtype` here, so that the reference has the same operands."""
    values = torch.randn(shape, generator=generator(seed), device=device(), dtype=torch.float32)
    return (values * scale).to(dtype)


def outliers(*shape: int, dtype: torch.dtype, seed: int, size: float = 1e4) -> torch.Tensor:
    """Normal, with one large row and one large column, as in activations of trained models."""
    values = normal(*shape, dtype=dtype, seed=seed)
    values[..., shape[-2] // 3, :] *= size
    values[..., :, shape[-1] // 2] *= size**0.5
    return values


def integers(*shape: int, dtype: torch.dtype, seed: int, density: float) -> torch.Tensor:
    """Sparse values of -1, 0 and 1: sums of thousands of their products are exact in bf16, in any order."""
    kind = torch.rand(shape, generator=generator(seed), device=device())
    return ((kind < density).to(dtype) - (kind < density / 2).to(dtype) * 2).to(dtype)


def hashed(*shape: int, dtype: torch.dtype, salt: int) -> torch.Tensor:
    """-1, 0 and 1 from a hash of the index, in integer arithmetic:
    equal on every device and in every release.
    """
    count, mask = int(torch.Size(shape).numel()), 0xFFFFFFFF
    mixed = (torch.arange(count, device=device(), dtype=torch.int64) * 2_654_435_761 + salt * 40_503) & mask
    mixed = ((mixed ^ (mixed >> 15)) * 2_246_822_519) & mask
    mixed ^= mixed >> 13
    return ((mixed % 13 == 0).to(dtype) - (mixed % 13 == 1).to(dtype)).reshape(shape)


def counting(*shape: int, dtype: torch.dtype, modulus: int, step: int = 7) -> torch.Tensor:
    """Element i is (step * i) mod modulus, so that a misplaced value is a wrong value."""
    count = int(torch.Size(shape).numel())
    index = torch.arange(count, device=device(), dtype=torch.int64)
    return ((index * step) % modulus).reshape(shape).to(dtype)


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor filled with NaN, so that an element that a kernel does not write is visible."""
    return tensor.fill_(float("nan"))


def leave_nan(like: Sequence[torch.Tensor], dtype: torch.dtype, on: torch.device | None = None) -> None:
    """Leave NaN in freed memory of these shapes, where what nobody writes is likely to be read next."""
    every = [one for one in like for _ in range(BLOCKS)]
    _ = [torch.full(one.shape, torch.nan, dtype=dtype, device=on or one.device) for one in every]


def guarded(*shape: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A NaN-filled view, and the buffer around it, which has GUARD elements more on each side."""
    count = int(torch.Size(shape).numel())
    whole = torch.full((count + 2 * GUARD,), float("nan"), device=device(), dtype=dtype)
    return whole[GUARD : GUARD + count].view(shape), whole


def guards_touched(view: torch.Tensor, whole: torch.Tensor) -> int:
    """How many elements around `view` no longer hold NaN."""
    start = view.storage_offset() - whole.storage_offset()
    outside = torch.cat((whole[:start], whole[start + view.numel() :]))
    return int((~outside.isnan()).sum())


def uneven(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Factors: most are 1, one in eight each is 0, 2^8 and 2^-12."""
    factors = torch.tensor((0.0, 2.0**8, 2.0**-12, *[1.0] * 5), dtype=torch.float64)
    return factors[torch.randint(0, len(factors), tuple(shape), generator=generator)]


def in_buffer(one: torch.Tensor, offset: int, step: int) -> torch.Tensor:
    """A copy with equal numbers, inside a buffer of NaN: after `offset` elements, each `step`-th one."""
    whole = torch.zeros(one.numel() * step + offset, dtype=one.dtype, device=one.device)
    if one.is_floating_point():
        whole.fill_(torch.nan)
    return whole[offset:].view(*one.shape, step)[..., 0].copy_(one)


def in_same_places(leaf: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A tensor with other numbers and equal strides, inside a copy of its buffer."""
    elements = leaf.untyped_storage().nbytes() // leaf.element_size()
    whole = change(leaf.detach().as_strided((elements,), (1,), 0))
    return whole.as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def signs(shape: torch.Size, seed: int) -> torch.Tensor:
    """Ones and minus ones of a seed."""
    return torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1
