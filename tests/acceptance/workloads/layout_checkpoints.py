"""What a drawn checkpoint has beside weights: other state, and a planner that waits for a step.

In: numbers; an event. Out: state that is no tensor; tensors for the writer.
"""

import random
import threading
from typing import Any

import torch.distributed.checkpoint as dcp

LATE_S = 120


class LatePlanner(dcp.DefaultSavePlanner):  # type: ignore[misc]
    """Gives the writer its tensors only when training has gone on."""

    def __init__(self, gone_on: threading.Event) -> None:
        super().__init__()
        self._gone_on = gone_on

    def resolve_data(self, write_item: Any) -> Any:
        """The tensor, after the step that runs beside the checkpoint."""
        if not self._gone_on.wait(LATE_S):
            raise RuntimeError(f"no step ended in {LATE_S} s beside a checkpoint")
        return super().resolve_data(write_item)


class Notes:
    """State that is no tensor, as a loader of data or a schedule has it."""

    def __init__(self, numbers: int) -> None:
        r = random.Random(numbers)
        kinds = (
            r.getrandbits(70),
            r.random(),
            str(r.random()),
            None,
            r.random() < 0.5,
            r.randbytes(5),
            (1, "a"),
            {3},
        )
        self.kept: dict[str, Any] = {
            "position": r.randrange(1000),
            "names": [str(r.random()) for _ in range(3)],
            "random": r.getstate(),
            "nested": {"a": [r.random(), {"b": r.choice(kinds)}], "c": r.sample(kinds, 4), "empty": {}},
        }

    def state_dict(self) -> dict[str, Any]:
        """What is saved."""
        return self.kept

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded."""
        self.kept = state
