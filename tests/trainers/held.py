"""How many bytes of tensors are alive. In: a body of torch calls. Out: the most at once, and those of now."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PLAIN = (torch.Tensor, torch.nn.Parameter)  # a DTensor has a storage of its whole size, without memory


class Held(TorchDispatchMode):
    """Counts the storages that operators make in its body; what they need inside is not seen.

    Attributes:
        now: Bytes alive after the last operator.
        peak: The most after any operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        _types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if type(made) in PLAIN and made.device.type == "cpu":
                storage = made.untyped_storage()
                self._alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}
        self.now = sum(size for _, size in self._alive.values())
        self.peak = max(self.peak, self.now)
        return out
