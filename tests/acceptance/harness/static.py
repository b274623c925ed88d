"""Checks that need no device: they run, and say the same, on a machine without any.

In: a function of `workloads`. Out: its result, from a child that sees no device. A vendor that was named and
is not there still fails the run; what an image holds can be told all the same.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import pytest

import vendors
from harness.session import AcceptanceSession
from harness.worker import Worker, WorkloadError


class InChild(Protocol):
    """Run a function of tests/acceptance/workloads in a child that sees no device."""

    def __call__(
        self,
        function: Callable[..., Any] | str,
        /,
        *,
        timeout_s: float = 300,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        **kwargs: object,
    ) -> Any: ...


@pytest.fixture(scope="module")
def in_child(acceptance: AcceptanceSession, vendor: vendors.Vendor) -> Iterator[InChild]:
    """Run `workloads` functions without a device; `fresh` in a process that has loaded nothing before."""
    worker = Worker(acceptance.result_dir / "children")

    def call(
        function: Callable[..., Any] | str,
        /,
        *,
        timeout_s: float = 300,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        **kwargs: object,
    ) -> Any:
        name = function if isinstance(function, str) else f"{function.__module__}:{function.__qualname__}"
        if fresh:
            worker.stop()
        try:
            environment = {**vendor.child_environment(()), **(env or {})}
            return worker.call(name, kwargs, environment=environment, timeout_s=timeout_s)
        except WorkloadError as error:
            problem = str(error)
        return pytest.fail(problem, pytrace=False)  # outside the handler: one failure and not a chain

    yield call
    worker.stop()
