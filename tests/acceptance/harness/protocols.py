"""What checks may ask of their fixtures, as types; fixtures.py fulfils them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol


class RecordMetric(Protocol):
    """Keep a figure of the check."""

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
    ) -> Any: ...


class Launch(Protocol):
    """Run a program under torchrun and return the JSON line of rank 0."""

    def __call__(
        self,
        program: str | Path,
        *args: object,
        nproc: int,
        timeout_s: float,
        env: Mapping[str, str] | None = None,
    ) -> dict[str, Any]: ...
