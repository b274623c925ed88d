"""Checkpoints that are complete or absent: torch.distributed.checkpoint in a folder that is renamed last.

In: a state of (sharded) tensors. Out: `step_00000042/` with the file COMPLETE in it. There are two tiers.
Every checkpoint holds what training needs (float32 master weights, moments, step), so each can be restored. A
`full` one also has `weights.safetensors`: whole weights under our names, for evaluation and export. Full ones
are kept; of the others only the newest.
"""

from __future__ import annotations

import collections
import copy
import json
import shutil
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh

import whole
from errors import RefusedError
from layouts.sharding import DTensor

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

    from layouts.job import Job

MARKER, WEIGHTS = "COMPLETE", "weights.safetensors"
KEPT = 2  # checkpoints that are kept beside the full ones


@dataclass
class Pending:
    """A checkpoint that is being written."""

    folder: Path
    facts: dict[str, Any]
    future: Future[Any] | None
    complete: bool = False


class Stager:
    """Copies a state to the CPU before training continues; torch's own stagers cannot copy every DTensor."""

    should_synchronize_after_execute = False

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """The copy, made before this returns."""
        return {key: on_host(value) for key, value in state.items()}

    def synchronize_staging(self) -> None:
        """Nothing to wait for: `stage` returns when the copy is made."""

    def close(self) -> None:
        """Nothing to free."""


def on_host(value: Any) -> Any:
    """A copy in CPU memory, sharded in the same way.

    Its mesh has no process groups: only the places of the shards are read. To make groups, all ranks of a job
    would have to make the same ones, and the stages of a pipeline have meshes of their own: they hung.
    """
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        local, mesh = value.to_local().detach().to("cpu", copy=True), value.device_mesh
        host = DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names, _init_backend=False)
        shape = {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(local, host, value.placements, run_check=False, **shape)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class Checkpoints:
    """A folder of checkpoints; one is written at a time. `beside`: texts of every one, by file name.

    `of`: what a job that continues must have in common with the one that wrote a checkpoint, by flag.
    """

    def __init__(
        self,
        root: Path,
        *,
        asynchronous: bool,
        kept_as: str | None,
        beside: dict[str, str],
        of: dict[str, Any],
    ) -> None:
        self.root, self.asynchronous, self.kept_as, self.beside = root, asynchronous, kept_as, beside
        self.of, self.lock = of, threading.Lock()
        self.group = dist.new_group(backend="gloo")
        self.pending: Pending | None = None
        self.seconds: list[float] = []

    def save(self, step: int, state: dict[str, Any], *, full: Job | None = None) -> None:
        """Write the state after `step`. On return it is complete, or still being written if asynchronous.

        Args:
            step: How many steps are done.
            state: As Job.state.
            full: The job whose whole weights this checkpoint holds too.
        """
        self.finish()
        begin = time.perf_counter()
        folder = self.root / f"step_{step:08}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            for name, text in self.beside.items():
                (folder / name).write_text(text)
        if full is not None:  # every rank makes each weight, rank 0 writes it
            shapes, weights = full.shapes(), full.weights()
            if dist.get_rank() == 0:
                whole.write(folder / WEIGHTS, shapes, weights)
            else:
                collections.deque(weights, maxlen=0)
        dist.barrier(group=self.group)
        target: dict[str, Any] = {"checkpoint_id": folder, "process_group": self.group}
        future = None
        if self.asynchronous:
            future = dcp.async_save(state, **target, async_stager=Stager())
        else:
            dcp.save(state, **target)
        facts = {"step": step, "world_size": dist.get_world_size(), "full": full is not None}
        facts |= {"kept_as": self.kept_as, "of": self.of}
        self.pending = pending = Pending(folder, facts, future)
        if future is not None and dist.get_rank() == 0:
            # Rank 0's future ends when the files of all ranks are written: no later save is needed.
            future.add_done_callback(lambda done: self._complete(pending, done.exception()))
        if not self.asynchronous:
            self.finish()
        self.seconds.append(time.perf_counter() - begin)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, until it is complete."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        if pending.future is not None:
            pending.future.result()
        if dist.get_rank() == 0:
            self._complete(pending)
        dist.barrier(group=self.group)

    def _complete(self, pending: Pending, failed: BaseException | None = None) -> None:
        """Mark and rename a written checkpoint, once: readers never see an incomplete one.

        `finish` raises what failed.
        """
        with self.lock:
            if pending.complete or failed is not None:
                return
            (pending.folder / MARKER).write_text(json.dumps(pending.facts))
            final = pending.folder.with_suffix("")
            shutil.rmtree(final, ignore_errors=True)
            pending.folder.rename(final)
            pending.complete = True
            self._prune()

    def newest(self) -> Path | None:
        """The newest complete checkpoint.

        Every rank gets rank 0's answer: a shared folder may show ranks different states.
        """
        found: list[Path | None] = [None]
        if dist.get_rank() == 0:
            found = [next(reversed(complete(self.root)), None)]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def load(self, folder: Path, state: dict[str, Any], *, changed: bool = False) -> None:
        """Fill the state in place. The number of ranks may differ from the run that wrote it.

        Raises:
            RefusedError: Its form differs from this run's form, or it is another job's, not `changed`.
        """
        wrote = facts(folder).get("of", self.of)
        now = self.of.items()
        differ = [f"{flag} {wrote.get(flag)}, not {x}" for flag, x in now if wrote.get(flag) != x]
        if differ and not changed:
            raise RefusedError(
                f"{folder} is of a job with {'; '.join(differ)}: samples would repeat or be left out, or the "
                "schedule would jump; give the same flags, or --changed to continue it as another job"
            )
        held = facts(folder).get("kept_as", self.kept_as)  # an older checkpoint does not say it
        if held != self.kept_as:
            raise RefusedError(
                f"{folder} was written by --parallel {held or 'fsdp2 or FSDP1'}, this run has --parallel "
                f"{self.kept_as or 'fsdp2 or FSDP1'}; give the same flags, or start a new job from whole "
                f"weights: --weights FOLDER of a checkpoint with {WEIGHTS}"
            )
        dcp.load(state, checkpoint_id=folder, process_group=self.group)

    def _prune(self) -> None:
        spare = [folder for folder in complete(self.root) if not facts(folder)["full"]]
        for folder in spare[:-KEPT]:
            shutil.rmtree(folder)


def complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(marker.parent for marker in root.glob(f"step_????????/{MARKER}"))


def facts(folder: Path) -> dict[str, Any]:
    """The content of COMPLETE: step, world_size, full, kept_as."""
    found: dict[str, Any] = json.loads((folder / MARKER).read_text())
    return found
