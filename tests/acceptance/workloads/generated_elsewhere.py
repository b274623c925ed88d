"""Where drawn operators run, if not on the processor: tensors go there and back, and a device may be lost.

In: a tensor or an error. Out: the tensor in the other place; what is left to do after the error.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from workloads import device, synchronize

SMALLEST, LARGEST = 2.0**-160, 2.0**140  # beyond every number of float32


class DeviceLostError(BaseException):
    """The device answers nothing any more, as after an assertion in a kernel: this process must end.

    No handler of what a case raises takes it.
    """


def place() -> torch.device | None:
    """Where drawn operators run, if not on the processor that draws them and that says what is right."""
    return None if device().type == "cpu" else device()


@contextlib.contextmanager
def answering() -> Iterator[None]:
    """Run the body on a device. Raises `DeviceLostError` if that answers nothing after an error."""
    try:
        yield
    except Exception as error:
        try:
            synchronize()
        except RuntimeError:
            raise DeviceLostError(first_line(error)) from error
        raise


def first_line(error: BaseException) -> str:
    """An error in one line: its class and its first words."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def placed(on: torch.device, leaf: Any) -> Any:
    """A tensor with its strides, and with the numbers around it, on a device; and a device's name."""
    if not isinstance(leaf, torch.Tensor):
        return on if _names_a_device(leaf) else leaf
    if leaf.layout is not torch.strided:
        return leaf.to(on)
    leaf = leaf.detach()
    whole = leaf.as_strided((leaf.untyped_storage().nbytes() // leaf.element_size(),), (1,), 0)
    return whole.to(on, copy=True).as_strided(leaf.shape, leaf.stride(), leaf.storage_offset())


def brought_back(leaf: Any) -> Any:
    """A tensor on the processor; and its name for a device's."""
    if isinstance(leaf, torch.Tensor):
        return leaf.detach().cpu()
    return torch.device("cpu") if _names_a_device(leaf) else leaf


def _names_a_device(leaf: Any) -> bool:
    """Whether this is a device, or a name that torch takes for one: where there is a GPU, samples name it."""
    if not isinstance(leaf, str):
        return isinstance(leaf, torch.device)
    with contextlib.suppress(RuntimeError):
        return bool(torch.device(leaf))
    return False


def shaken(leaf: Any, move: int) -> Any:
    """All numbers of a tensor in float64, each by less than a rounding of float32 away from its equals.

    The first move lifts them in the order of their places, the second one in the other order, each other one
    in an order of its own. An infinity and what is no number become large numbers.
    """
    if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
        return leaf
    orders = (torch.arange, lambda n: torch.arange(n).flip(0))
    seeded = torch.Generator().manual_seed(move)
    order = orders[move](leaf.numel()) if move < 2 else torch.randperm(leaf.numel(), generator=seeded)
    lift = ((order.view(leaf.shape) + 1).double() / leaf.numel() * 2.0**-28).to(leaf.device)
    exact = leaf.nan_to_num(2 * LARGEST, LARGEST, -LARGEST)
    return torch.where(exact == 0, lift * SMALLEST, exact + exact.abs() * lift)
