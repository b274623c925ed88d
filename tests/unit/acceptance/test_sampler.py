"""Samples of a check that ends at once: one error of the library costs nothing, two leave its problem."""

from collections.abc import Sequence
from typing import Any

import pytest

from harness.monitor import MonitorError, Sampler

MESSAGE = "the library stumbled"


class Library:
    """Fails as often as it is told, then answers."""

    timeout_s = 60.0

    def __init__(self, failures: int) -> None:
        self.failures = failures

    def sample(self, indices: Sequence[int]) -> tuple[Any, ...]:
        if self.failures:
            self.failures -= 1
            raise MonitorError(MESSAGE)
        return tuple(indices)


@pytest.mark.parametrize(
    ("failures", "samples", "problem"), [(0, 1, None), (1, 1, MESSAGE), (99, 0, MESSAGE)]
)
def test_a_short_check_is_sampled_once_at_least(failures: int, samples: int, problem: str | None) -> None:
    library: Any = Library(failures)
    sampler = Sampler(library, [0])
    sampler._done.set()  # the check has ended before the first answer
    assert len(sampler.start().finish()) == samples
    assert sampler.problem == problem
