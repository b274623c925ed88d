"""Lines of progress in TensorBoard and Weights & Biases.

In: the facts of each line, on rank 0. Out: their files.

What a line has is what they have: a number of the line is a scalar of its step.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from options import Options

NEEDED = ("tensorboard", "wandb")  # the package of the option with the same name


def require(options: Options) -> None:
    """Refuse an option whose package is not installed, on every rank, before any of them waits."""
    for name in NEEDED:
        if getattr(options, name) is not None and importlib.util.find_spec(name) is None:
            raise RefusedError(f"--{name} needs {name}, which is not installed; pip install {name}")


class Trackers:
    """The trackers that the options name. They open with the first line."""

    def __init__(self, options: Options, first_step: int) -> None:
        self.options, self.first_step = options, first_step
        self.opened: list[tuple[Callable[[int, dict[str, float]], Any], Callable[[], Any]]] | None = None

    def write(self, facts: dict[str, Any]) -> None:
        """The numbers of a line."""
        if self.opened is None:
            made = (self._tensorboard, self._wandb)
            self.opened = [open_() for name, open_ in zip(NEEDED, made, strict=True) if self._asked(name)]
        numbers = {name: value for name, value in facts.items() if name != "step" and value is not None}
        for log, _ in self.opened:
            log(facts["step"], numbers)

    def close(self) -> None:
        """Everything is in the files on return."""
        for _, close in self.opened or ():
            close()
        self.opened = None

    def _asked(self, name: str) -> bool:
        return getattr(self.options, name) is not None

    def _tensorboard(self) -> tuple[Callable[..., Any], Callable[[], Any]]:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed job takes the place of the steps that a run before had done behind its checkpoint.
        writer = SummaryWriter(str(self.options.tensorboard), purge_step=self.first_step + 1)

        def log(step: int, numbers: dict[str, float]) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        return log, writer.close

    def _wandb(self) -> tuple[Callable[..., Any], Callable[[], Any]]:
        import wandb

        said = {name: value for name, value in vars(self.options).items() if value is not None}
        plain = {
            name: value if isinstance(value, bool | int | float) else str(value)
            for name, value in said.items()
        }
        run = wandb.init(project=self.options.wandb, config=plain)
        return (lambda step, numbers: run.log(numbers, step=step)), run.finish
