"""Checkpoints that are whole or absent: torch.distributed.checkpoint in a folder that gets its name last.

In: a state of (sharded) tensors. Out: `step_00000042/` with the file COMPLETE in it. Two tiers: every
checkpoint holds all that training needs (float32 master weights, moments, step), so each one is restorable; a
`full` one adds `weights.pt`, whole weights under this project's names for evaluation and export. Restorable
ones are pruned, full ones are kept.
"""

from __future__ import annotations

import copy
import json
import shutil
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from concurrent.futures import Future
    from pathlib import Path

MARKER = "COMPLETE"
KEPT = 2  # restorable checkpoints that stay beside the full ones


@dataclass
class Pending:
    """A checkpoint being written."""

    folder: Path
    facts: dict[str, Any]
    future: Future | None


class Stager:
    """Copies a state to the CPU before training goes on; torch's own stagers cannot copy every DTensor."""

    should_synchronize_after_execute = False

    def stage(self, state: dict[str, Any]) -> dict[str, Any]:
        """The copy, made before this returns."""
        return on_host(state)

    def synchronize_staging(self) -> None:
        """Nothing is under way after stage."""

    def close(self) -> None:
        """Nothing is held."""


def on_host(value: Any) -> Any:
    """A copy in the CPU's memory, sharded as it was."""
    if isinstance(value, dict):
        return {key: on_host(item) for key, item in value.items()}
    if isinstance(value, DTensor):
        local, mesh = value.to_local().detach().to("cpu", copy=True), value.device_mesh
        host = (
            mesh
            if mesh.device_type == "cpu"
            else DeviceMesh("cpu", mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
        )
        shape = {"shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(local, host, value.placements, run_check=False, **shape)
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


class Checkpoints:
    """A folder of checkpoints; at most one is being written at a time."""

    def __init__(self, root: Path, *, asynchronous: bool) -> None:
        self.root, self.asynchronous = root, asynchronous
        self.group = dist.new_group(backend="gloo")
        self.pending: Pending | None = None
        self.seconds: list[float] = []

    def save(self, step: int, state: dict[str, Any], *, weights: dict[str, Any] | None = None) -> None:
        """Write the state after `step`; on return it is complete, or under way when asynchronous."""
        self.finish()
        begin = time.perf_counter()
        folder = self.root / f"step_{step:08}.partial"
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if weights is not None:
                torch.save(weights, folder / "weights.pt")
        dist.barrier(group=self.group)
        where = {"checkpoint_id": folder, "process_group": self.group}
        if self.asynchronous:
            result = dcp.async_save(state, **where, async_stager=Stager())
        else:
            result = dcp.save(state, **where)
        facts = {"step": step, "world_size": dist.get_world_size(), "full": weights is not None}
        self.pending = Pending(folder, facts, result if self.asynchronous else None)
        if not self.asynchronous:
            self.finish()
        self.seconds.append(time.perf_counter() - begin)

    def finish(self) -> None:
        """Wait for what is being written and give it its name; readers never see less than a whole one."""
        if self.pending is None:
            return
        pending, self.pending = self.pending, None
        if pending.future is not None:
            pending.future.result()
        if dist.get_rank() == 0:
            (pending.folder / MARKER).write_text(json.dumps(pending.facts))
            final = pending.folder.with_suffix("")
            shutil.rmtree(final, ignore_errors=True)
            pending.folder.rename(final)
            self._prune()
        dist.barrier(group=self.group)

    def newest(self) -> Path | None:
        """The newest complete checkpoint; every rank gets rank 0's answer."""
        found = [complete(self.root)[-1] if complete(self.root) else None] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def load(self, folder: Path, state: dict[str, Any]) -> None:
        """Fill the state in place; ranks may be fewer or more than wrote it."""
        dcp.load(state, checkpoint_id=folder, process_group=self.group)

    def _prune(self) -> None:
        spare = [folder for folder in complete(self.root) if not facts(folder)["full"]]
        for folder in spare[:-KEPT]:
            shutil.rmtree(folder)


def complete(root: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(marker.parent for marker in root.glob(f"step_????????/{MARKER}"))


def facts(folder: Path) -> dict[str, Any]:
    """What the marker says: step, world_size, full."""
    return json.loads((folder / MARKER).read_text())
