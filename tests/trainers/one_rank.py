"""A job of this process alone. In: flags. Out: its parts; the process is left as it was."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import data
import options as cli
import plan as plans
import presets
import world
from layouts import job as layouts


@contextmanager
def joined(options: cli.Options) -> Iterator[world.World]:
    """The world of one rank on the CPU."""
    with mock.patch.dict(os.environ), mock.patch("signal.signal"), world.joined_ranks(options) as ranks:
        yield ranks


@contextmanager
def job_of(*flags: str) -> Iterator[Any]:
    """`job`, `plan`, `options`, and `batch(step, micro)` of a tiny model."""
    options = cli.parse([*flags, "--device", "cpu"])
    preset = presets.find(options.model, "tiny", layers=options.layers, lean=options.lean)
    with joined(options) as ranks:
        plan = plans.settle(options, preset, ranks)
        job, feed = layouts.create(options, preset, plan, ranks), data.Feed(options, preset, plan)

        def batch(step: int, micro: int) -> dict[str, Any]:
            return feed.batch(plan.numbers(step, micro, job), ranks.device)

        yield SimpleNamespace(job=job, plan=plan, options=options, batch=batch)
