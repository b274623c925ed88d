"""Python's cyclic garbage collector off, while a block reads many documents. In: a block. Out: nothing.

Documents have no cycles: reference counting frees them. The search for cycles took two thirds of the time of
a rebuild of the history, and half of the time of judging a thousand nodes.
"""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def without_collector(*, kept: bool = False) -> Iterator[None]:
    """Switch the collector off for the block; no later collection looks at what is `kept` either."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            if kept:
                gc.freeze()
            gc.enable()
