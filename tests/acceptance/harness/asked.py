"""Ask the image's Python what it has. In: a function of `harness.about`. Out: its answer.

In a run on a bare machine that Python is this one, and the function is simply called.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from harness import processes
from harness.processes import WorkloadError
from harness.worker import Worker

ANSWER_S = 360.0  # longer than pip and a compiler may take
Answer = TypeVar("Answer")
_workers: dict[str, Worker] = {}


def of_image(function: Callable[..., Answer], **kwargs: Any) -> Answer:
    """What a function of `harness.about` returns in the image."""
    inside = processes.container()
    if inside is None:
        return function(**kwargs)
    worker = _workers.setdefault("about", Worker(Path(inside.own) / "children"))
    name = f"{function.__module__}:{function.__qualname__}"
    try:
        answer: Answer = worker.call(name, kwargs, environment={}, timeout_s=ANSWER_S)
    except WorkloadError as error:
        problem = str(error)
    else:
        return answer
    return pytest.fail(problem, pytrace=False)  # outside the handler, so that no exception is chained


def stop() -> None:
    """End the process that answers."""
    for worker in _workers.values():
        worker.stop()
    _workers.clear()
