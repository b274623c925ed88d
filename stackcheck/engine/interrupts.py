"""Signals that end a run, put off while the engine makes or removes something. In: a body. Out: the signals.

Ctrl-C, SIGTERM and the alarm of a time limit raise an exception wherever the program is. If that is inside a
request that makes a container, the engine makes it all the same, and nobody removes it; if it is inside its
removal, the container stays. Slurm sends SIGTERM twice within a millisecond when the time of a job is over.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)


class Interrupts:
    """Hands signals to the program's own handlers, but only while the gate is open.

    Attributes:
        handlers: Signal -> the handler that the program has set.
    """

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[int] = []
        self._open = self._raised = False

    def take(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal now or later. The first one that raises ends the run; those after it are late."""
        if not self._open:
            self._came.append(number)
            return
        self._open, self._raised = False, True
        self.handlers[number](number, frame)
        self._open, self._raised = True, False

    @contextlib.contextmanager
    def let_in(self) -> Iterator[None]:
        """In the body signals come at once; those that were put off come first."""
        try:
            self._open = True
            self._hand_out()
            yield
        finally:
            self._open = False

    def end(self) -> None:
        """Hand out what came while the gate was closed, unless a signal has ended the run already."""
        if not self._raised:
            self._open = True
            self._hand_out()

    def _hand_out(self) -> None:
        while self._came:
            self.take(self._came.pop(0), None)


@contextlib.contextmanager
def held() -> Iterator[Interrupts]:
    """In the body signals wait, except where `let_in` says. Only the main thread gets any."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    with contextlib.ExitStack() as handlers:  # sets all back, even if a signal comes between two of them
        handlers.callback(interrupts.end)
        for number in SIGNALS:
            before = signal.getsignal(number)
            if callable(before):
                interrupts.handlers[number] = before
                handlers.callback(_set_back, number, interrupts)
                signal.signal(number, interrupts.take)
        yield interrupts


def _set_back(number: int, interrupts: Interrupts) -> None:
    """The handler of before, unless a handler itself has chosen another one: to ignore what follows, say."""
    if signal.getsignal(number) == interrupts.take:
        signal.signal(number, interrupts.handlers[number])
