"""The types of the fixtures that a check calls. In: what it passes. Out: what comes back."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class RecordMetric(Protocol):
    """Record a metric of the check."""

    def __call__(
        self,
        name: str,
        value: float,
        *,
        unit: str,
        repeats: Sequence[float] = (),
        conditions: Mapping[str, Any] | None = None,
        gate: bool = False,
        bound_needed: bool = True,
    ) -> None: ...


class OnDevice(Protocol):
    """Run a function of tests/acceptance/workloads in the process that owns the leased devices."""

    def __call__(
        self,
        function: Callable[..., Any] | str,
        /,
        *,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> Any: ...  # what the workload returns, read from JSON


class InChild(Protocol):
    """Run a function of tests/acceptance/workloads in a child process that sees no device."""

    def __call__(
        self,
        function: Callable[..., Any] | str,
        /,
        *,
        timeout_s: float = 300,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        **kwargs: object,
    ) -> Any: ...  # what the workload returns, read from JSON


class InNewProcesses(Protocol):
    """Run a function of tests/acceptance/workloads in several new processes that share the leased devices."""

    def __call__(
        self,
        function: Callable[..., Any] | str,
        /,
        *,
        processes: int,
        timeout_s: float = 120,
        env: Mapping[str, str] | None = None,
        **kwargs: object,
    ) -> list[Any]: ...  # what each of them returns, read from JSON


class Launch(Protocol):
    """Run a program under torchrun and return the JSON line of rank 0; with `fresh=True` in new processes."""

    def __call__(
        self,
        program: str | Path,
        *args: object,
        nproc: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> dict[str, Any]: ...
