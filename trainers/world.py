"""This process among the ranks: its device, the process group, the stop signal.

In: Options, and the environment that torchrun sets. Out: a World.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import gc
import importlib.util
import os
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from options import Options


@dataclass(frozen=True)
class World:
    """This rank among `size`, its device, and whether SIGTERM has come."""

    rank: int
    size: int
    device: torch.device
    stop: Stop = field(repr=False)

    @property
    def gpu(self) -> bool:
        """Whether the device is a GPU. torch calls ROCm's device cuda too."""
        kind: str = self.device.type
        return kind == "cuda"

    def memory(self) -> int:
        """Bytes that this rank can have: of its GPU, or its share of the host's."""
        if self.gpu:
            present: int = torch.cuda.get_device_properties(self.device).total_memory
            return present
        return host_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


def host_memory(root: Path = Path("/")) -> int:
    """Bytes of this host, or fewer where a control group of this process or of its container allows fewer."""
    own = [Path(line.split(":", 2)[2]) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group in {Path("/"), *own, *(above for path in own for above in path.parents)}:
        for name in (f"{group}/memory.max", f"memory{group}/memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # not there, or "max"
                found.append(int((root / "sys/fs/cgroup" / name.lstrip("/")).read_text()))
    return min(found)


class Stop:
    """Remembers SIGTERM. Ranks receive it at different times, so they decide together between two steps."""

    def __init__(self) -> None:
        self.heard = False
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, _signal: int, _frame: object) -> None:
        self.heard = True

    def agreed(self, elapsed_s: float = 0.0, *, bad: bool = False) -> tuple[bool, bool, float]:
        """Whether any rank received SIGTERM, whether one has a `bad` figure, and the longest time.

        A collective call on the CPU: every rank gets the same answer. Clocks differ, and a rank that ended
        its loop a step earlier than the others would leave them waiting.
        """
        each = torch.tensor([float(self.heard), float(bad), elapsed_s], dtype=torch.float64)
        dist.all_reduce(each, op=dist.ReduceOp.MAX)
        return bool(each[0]), bool(each[1]), float(each[2])


@contextlib.contextmanager
def joined_ranks(options: Options) -> Iterator[World]:
    """Open the process group that torchrun describes (or one process without it), close it at the end.

    Raises:
        RefusedError: NumPy is missing.
    """
    if importlib.util.find_spec("numpy") is None:
        raise RefusedError(
            "torch needs NumPy to exchange objects between ranks, and it is not installed; pip install numpy"
        )
    stop = Stop()
    single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    single |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in single.items():
        os.environ.setdefault(name, value)
    device = _device(options)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _open_group(device)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), device, stop)
        dist.barrier()
    finally:
        gc.collect()  # what holds a group must end before the group, not with the interpreter
        dist.destroy_process_group()


def seed_process(options: Options) -> None:
    """Seed this process, and refuse kernels that differ between runs if --deterministic says so.

    --prefer-deterministic only keeps ROCm's libraries from adding up with atomics, which they do by default.
    In PyTorch's aten/src/ATen, cuda/CublasHandlePool.cpp asks deterministicAlgorithms() for every product and
    miopen/Descriptors.h for every convolution, and warn_only leaves that true (Context.cpp).
    hipBLASLt has no such switch. AMD's own deterministic mode also sets NCCL_ALGO=Ring (AMD-AGI/Primus,
    runner/helpers/hooks/05_deterministic.sh).
    """
    torch.manual_seed(options.seed)
    asked = options.deterministic or options.prefer_deterministic
    torch.use_deterministic_algorithms(asked, warn_only=asked and not options.deterministic)


def _device(options: Options) -> torch.device:
    kind = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")


def _of_this_start(timeout: dt.timedelta) -> dict[str, Any]:
    """Arguments that keep the keys of this start apart from those before a restart; none without torchrun.

    torchrun keeps one store over its restarts, in which gloo finds the addresses of the killed ranks and
    fails: torch 2.13 no longer adds the number of the restart to the keys. On several nodes agents count
    restarts each for themselves; there TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 gives each start its own store.
    """
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or restart == "0":
        return {}
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
    return {"store": dist.PrefixStore(f"restart_{restart}", store), "rank": rank, "world_size": size}


def _open_group(device: torch.device) -> None:
    timeout, given = dt.timedelta(minutes=10), {}
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == int(os.environ["WORLD_SIZE"]):
        # All ranks are on this node, so they use the loopback: torchrun gives the host's name as the master's
        # address (--standalone too), and a container without a network cannot resolve its own name.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        given = _of_this_start(timeout)
    # gloo serves CPU tensors beside NCCL or RCCL: the stop flag and checkpoints must not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        timeout=timeout,
        **given,
        device_id=device if device.type == "cuda" else None,
    )
