"""A limit of what a program for a compiler may run. In: kernels. Out: their types, or a refusal."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from workloads import generated_trees

MOST_KERNELS = 200  # of one program
MOST_NUMBERS = 2**22  # of what one kernel gives
READS_NUMBERS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}  # a tracer has none to read


class Few(TorchDispatchMode):  # type: ignore[misc]
    """Refuses programs of many kernels, of large ones, and of those that no tracer takes; notes their types.

    A compiler takes a minute for a loop of thousands, and the judge has several results in float64 at once.
    """

    def __init__(self) -> None:
        """Nothing has run yet."""
        super().__init__()
        self.count, self.types = 0, set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel and count it."""
        self.count += 1
        if self.count > MOST_KERNELS or READS_NUMBERS.intersection(func.tags):
            raise NotImplementedError(f"not supported: {func} in a program")
        out = generated_trees.run(func, args, kwargs or {})
        given = [one for one in generated_trees.leaves(out) if generated_trees.is_number(one)]
        if any(one.numel() > MOST_NUMBERS for one in given):
            raise NotImplementedError(f"not supported: {func} of so many numbers")
        self.types |= {one.dtype for one in given}
        return out
