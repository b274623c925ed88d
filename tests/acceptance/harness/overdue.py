"""How a check ends whose workload failed. In: its error. Out: a failure; one by the clock says so.

The limits were set on H200s, and elsewhere they are a multiple of those (`AcceptanceSession.limit_s`). Where
the multiple is a guess, the host takes this for no fault of the image (stackcheck/suite/guesses.py).
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from harness import causes
from harness.processes import TimeLimitError, WorkloadError


# pytest documents this exception as an attribute of a function, which is no class to a type checker.
class OverdueError(pytest.fail.Exception):  # type: ignore[name-defined,misc]
    """A limit of time ended the check: it hung, or it is slower than anybody thought."""

    __module__ = "builtins"  # as pytest's own: else each reason would begin with our module

    def __init__(self, words: str) -> None:
        super().__init__(words, pytrace=False)


@contextlib.contextmanager
def failing(more: Callable[[], str] = str) -> Iterator[None]:
    """Fail the check if a workload of this block fails; `more` gives further lines then."""
    problem = None
    try:
        yield
    except WorkloadError as error:
        problem = error
    if problem:  # outside the handler, so that no exception is chained
        hints = (f"look at: {cause}" for text, cause in causes.OF_ERRORS.items() if text in str(problem))
        words = "\n".join(filter(None, (str(problem), more(), *hints)))
        if isinstance(problem, TimeLimitError):
            raise OverdueError(words)
        pytest.fail(words, pytrace=False)
