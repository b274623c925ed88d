"""A stand-in for torch on ROCm inside a fabricated host: what `workloads.devices` asks of it, over HIP.

In: $FAKEHIP, the stand-in for libamdhip64; $FAKEAMD_HIP, the HIP release that this torch claims. Out: devices
as HIP shows them to this process, and tensors of 64-bit integers and bytes that HIP's calls copy.

It is no torch: it proves which devices the variables of a child leave, in which order, by which ids, and that
copies go where the suite sends them. It has no kernels, no autograd, no collectives and no speed.
"""

import ctypes

from torch import cuda
from torch import version as version

uint8, int64 = 1, 8  # a type is its size here


class Tensor:
    """Elements of one type in host memory or in that of a device."""

    def __init__(self, count: int, dtype: int, device: object = None) -> None:
        self.count, self.dtype, self.device = count, dtype, cuda.number(device)
        size = count * dtype
        self._owned = None if self.device is not None else ctypes.create_string_buffer(size)
        self.at = cuda.allocated(self.device, size) if self._owned is None else ctypes.addressof(self._owned)

    def __del__(self) -> None:
        if self._owned is None:
            cuda.freed(self.at)

    def pin_memory(self) -> "Tensor":
        """Host memory is host memory here."""
        return self

    def copy_(self, other: "Tensor", *, non_blocking: bool = False) -> "Tensor":
        """By the call that HIP has for these two places."""
        del non_blocking
        size = self.count * self.dtype
        assert size == other.count * other.dtype
        cuda.copied((self.at, self.device), (other.at, other.device), size)
        return self

    def to(self, device: object) -> "Tensor":
        """A copy on a device."""
        return Tensor(self.count, self.dtype, device).copy_(self)

    def cpu(self) -> "Tensor":
        """A copy on the host."""
        return Tensor(self.count, self.dtype).copy_(self)

    def __mul__(self, scale: int) -> "Affine":
        return Affine(self.count, scale, 0)

    def __ne__(self, other: object) -> "Different":  # type: ignore[override]
        return Different(self, other)

    __hash__ = object.__hash__


class Affine(Tensor):
    """`scale` times the index plus `offset`, as `arange` begins it."""

    def __init__(self, count: int, scale: int, offset: int) -> None:
        super().__init__(count, int64)
        self.scale, self.offset = scale, offset
        cuda.library().fakehip_affine(*map(ctypes.c_longlong, (self.at, count, scale, offset)))

    def __add__(self, more: int) -> "Affine":
        return Affine(self.count, self.scale, self.offset + more)


class Different:
    """Which elements differ."""

    def __init__(self, one: Tensor, other: object) -> None:
        self.one, self.other = one, other

    def sum(self) -> int:
        """How many."""
        assert isinstance(self.other, Tensor)
        count = cuda.library().fakehip_different
        count.restype = ctypes.c_size_t
        return int(count(*map(ctypes.c_longlong, (self.one.at, self.other.at, self.one.count))))


def empty(count: int, *, dtype: int) -> Tensor:
    """On the host."""
    return Tensor(count, dtype)


def empty_like(other: Tensor, *, device: object = None) -> Tensor:
    """Of the same type and size."""
    return Tensor(other.count, other.dtype, device)


def full(shape: tuple[int], value: int, *, dtype: int, device: object = None) -> Tensor:
    """Of 64-bit integers."""
    assert dtype == int64
    return Tensor(shape[0], dtype, device).copy_(Affine(shape[0], 0, value))


def arange(count: int, *, dtype: int) -> Affine:
    """0, 1, 2 …"""
    assert dtype == int64
    return Affine(count, 1, 0)
