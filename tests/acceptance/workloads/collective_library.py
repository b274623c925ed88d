"""Call NCCL or RCCL as nccl-tests does: out of place, on one stream, without torch in between.

In: the library that torch has loaded, and buffers. Out: calls that enqueue one collective each. Names, types
and numbers are the same in both vendors' libraries (nccl.h and rccl.h), so one binding serves both.
"""

import ctypes
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from workloads.ranks import Ranks

BF16, SUM = 9, 0  # ncclDataType_t, ncclRedOp_t
ELEMENT_BYTES = 2
ID_BYTES = 128
ALIGNED = 8  # elements: nccl-tests rounds the share of a rank down to 16 bytes
# A static build (conda's, NVIDIA's own) has the same symbols in torch's device library.
HOLDERS = (r"/lib(nccl|rccl)\.so", r"/libtorch_(cuda|hip)\.so")

_POINTER, _INT, _COUNT = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_REDUCING = [_POINTER, _POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER]
_MOVING = [_POINTER, _POINTER, _COUNT, _INT, _POINTER, _POINTER]
_PAIRED = [_POINTER, _COUNT, _INT, _INT, _POINTER, _POINTER]


class UniqueId(ctypes.Structure):
    """ncclUniqueId, passed by value."""

    _fields_ = (("internal", ctypes.c_byte * ID_BYTES),)


SIGNATURES = {
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [ctypes.POINTER(_POINTER), _INT, UniqueId, _INT],
    "ncclAllReduce": _REDUCING,
    "ncclReduceScatter": _REDUCING,
    "ncclAllGather": _MOVING,
    "ncclSend": _PAIRED,
    "ncclRecv": _PAIRED,
    "ncclGroupStart": [],
    "ncclGroupEnd": [],
    "ncclCommDestroy": [_POINTER],
}
CALLS = {"all_reduce": "ncclAllReduce", "reduce_scatter": "ncclReduceScatter", "all_gather": "ncclAllGather"}
ALL_TO_ALL = "ncclAlltoAll"  # NCCL 2.28 and later; before it, and in RCCL, sends and receives in one group


@dataclass(frozen=True)
class Plan:
    """Elements of one collective on one rank, as in nccl-tests' GetCollByteCount."""

    sent: int
    received: int
    count: int  # the library's argument

    @property
    def total_bytes(self) -> int:
        """The size that counts for the bandwidth: the larger of what is sent and received."""
        return max(self.sent, self.received) * ELEMENT_BYTES


def plan(op: str, size_bytes: int, ranks: int) -> Plan:
    """How many elements each rank sends and receives if the whole array has `size_bytes`."""
    count = size_bytes // ELEMENT_BYTES
    if op == "all_reduce":
        return Plan(count, count, count)
    share = count // ranks // ALIGNED * ALIGNED
    whole = share * ranks
    return {
        "all_gather": Plan(share, whole, share),
        "reduce_scatter": Plan(whole, share, share),
        "all_to_all": Plan(whole, whole, share),
    }[op]


def holder(maps: str | None = None) -> str:
    """The file from which torch loaded the library. Raises `LookupError` if no loaded file contains it."""
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    loaded = {fields[5] for line in text.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    for pattern in HOLDERS:
        if found := sorted(path for path in loaded if re.search(pattern, path)):
            return found[0]
    raise LookupError("this process has loaded no libnccl, librccl, libtorch_cuda or libtorch_hip")


class Communicator:
    """A separate communicator over the ranks, beside torch's."""

    def __init__(self, ranks: Ranks, stream: int, *, library: str | None = None) -> None:
        self.ranks, self.stream = ranks, stream
        self._library = ctypes.CDLL(library or holder())
        for name, arguments in SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._grouped = not hasattr(self._library, ALL_TO_ALL)
        if not self._grouped:
            getattr(self._library, ALL_TO_ALL).argtypes = _MOVING
        self._handle = _POINTER()
        self._ask("ncclCommInitRank", ctypes.byref(self._handle), ranks.size, self._identity(), ranks.rank)

    def _identity(self) -> UniqueId:
        """The unique id of rank 0, through the store."""
        identity = UniqueId()
        if self.ranks.rank == 0:
            self._ask("ncclGetUniqueId", ctypes.byref(identity))
            self.ranks.store.set("library/id", bytes(identity).hex())
        text = self.ranks.store.get("library/id").decode()
        return UniqueId.from_buffer_copy(bytes.fromhex(text))

    def _ask(self, name: str, *arguments: object) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} answered {code} on rank {self.ranks.rank} (ncclResult_t of nccl.h)")

    def caller(
        self, op: str, planned: Plan, sent: torch.Tensor, received: torch.Tensor
    ) -> Callable[[int], None]:
        """A function that enqueues one collective; each iteration uses the next part of the buffers.

        nccl-tests does so too, so that no iteration finds its data in a cache (startColl in its common.cu).
        """
        steps = max(1, min(sent.numel(), received.numel()) * ELEMENT_BYTES // planned.total_bytes)
        source, target = sent.data_ptr(), received.data_ptr()
        enqueue = self._all_to_all if op == "all_to_all" else self._single(CALLS[op], reducing="reduce" in op)

        def call(iteration: int) -> None:
            shift = planned.total_bytes * (iteration % steps)
            enqueue(source + shift, target + shift, planned.count)

        return call

    def _single(self, name: str, *, reducing: bool) -> Callable[[int, int, int], None]:
        kinds = (BF16, SUM) if reducing else (BF16,)
        function, rest = getattr(self._library, name), (*kinds, self._handle, self.stream)

        def enqueue(source: int, target: int, count: int) -> None:
            if code := function(source, target, count, *rest):
                raise RuntimeError(f"{name} answered {code} on rank {self.ranks.rank}")

        return enqueue

    def _all_to_all(self, source: int, target: int, count: int) -> None:
        if not self._grouped:
            self._ask(ALL_TO_ALL, source, target, count, BF16, self._handle, self.stream)
            return
        self._ask("ncclGroupStart")
        for peer in range(self.ranks.size):
            shift = peer * count * ELEMENT_BYTES
            self._ask("ncclSend", source + shift, count, BF16, peer, self._handle, self.stream)
            self._ask("ncclRecv", target + shift, count, BF16, peer, self._handle, self.stream)
        self._ask("ncclGroupEnd")

    def close(self) -> None:
        """Destroy the communicator, on which no call may be running."""
        self._ask("ncclCommDestroy", self._handle)
