"""A stand-in for NCCL's library on a CPU. In: calls through ctypes. Out: the same results, by gloo.

Its functions are C functions made from Python ones, so that numbers, pointers and the 128 bytes that are
passed by value go through the binding as on a GPU. `ctypes.CDLL` is replaced meanwhile.
"""

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from workloads import collective_library as library

HANDLE = 4711


def opened(_path: str) -> Any:
    """A library with every function of the binding except the newest, like NCCL before 2.28 and RCCL."""
    functions = Functions()
    return mock.Mock(
        spec=list(library.SIGNATURES),
        **{
            name: ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(getattr(functions, name))
            for name, arguments in library.SIGNATURES.items()
        },
    )


@contextlib.contextmanager
def planted() -> Iterator[None]:
    """Every library that is opened in this context is the stand-in."""
    with mock.patch.object(ctypes, "CDLL", opened):
        yield


def _tensor(address: int, count: int) -> torch.Tensor:
    raw = (ctypes.c_byte * (2 * count)).from_address(address)
    return torch.frombuffer(raw, dtype=torch.bfloat16)


class Functions:
    """One rank's side of the library; each function returns 0, which is ncclSuccess."""

    def __init__(self) -> None:
        self.pending: list[tuple[Any, torch.Tensor, int]] = []

    def ncclGetUniqueId(self, identity: Any) -> int:  # noqa: N802
        identity.contents.internal[0] = 42
        return 0

    def ncclCommInitRank(self, handle: Any, ranks: int, identity: Any, rank: int) -> int:  # noqa: N802
        handle[0] = HANDLE
        same = (ranks, rank, identity.internal[0]) == (dist.get_world_size(), dist.get_rank(), 42)
        return 0 if same else 4  # ncclInvalidArgument

    def ncclCommDestroy(self, handle: int) -> int:  # noqa: N802
        return 0 if handle == HANDLE else 4

    def ncclAllReduce(self, sent: int, out: int, count: int, *rest: int) -> int:  # noqa: N802
        if rest[:3] != (library.BF16, library.SUM, HANDLE):
            return 4
        target = _tensor(out, count)
        target.copy_(_tensor(sent, count))
        dist.all_reduce(target)
        return 0

    def ncclReduceScatter(self, sent: int, out: int, count: int, *_rest: int) -> int:  # noqa: N802
        dist.reduce_scatter_tensor(_tensor(out, count), _tensor(sent, count * dist.get_world_size()))
        return 0

    def ncclAllGather(self, sent: int, out: int, count: int, *_rest: int) -> int:  # noqa: N802
        dist.all_gather_into_tensor(_tensor(out, count * dist.get_world_size()), _tensor(sent, count))
        return 0

    def ncclSend(self, address: int, count: int, _kind: int, peer: int, *_rest: int) -> int:  # noqa: N802
        self.pending.append((dist.isend, _tensor(address, count), peer))
        return 0

    def ncclRecv(self, address: int, count: int, _kind: int, peer: int, *_rest: int) -> int:  # noqa: N802
        self.pending.append((dist.irecv, _tensor(address, count), peer))
        return 0

    def ncclGroupStart(self) -> int:  # noqa: N802
        self.pending.clear()
        return 0

    def ncclGroupEnd(self) -> int:  # noqa: N802
        mine = dist.get_rank()
        own = {kind: tensor for kind, tensor, peer in self.pending if peer == mine}
        own[dist.irecv].copy_(own[dist.isend])
        others = [dist.P2POp(kind, tensor, peer) for kind, tensor, peer in self.pending if peer != mine]
        for work in dist.batch_isend_irecv(others) if others else ():
            work.wait()
        return 0
