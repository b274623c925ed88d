"""Faults that NVIDIA's driver reports. In: an NVML event set. Out: `Event`s as they come.

The Xids and their meaning: NVIDIA GPU Deployment and Management Documentation, "Xid Errors".
"""

from collections.abc import Collection, Iterator
from typing import Any

from vendors import Absence, Event
from vendors.nvidia_library import ask

WAIT_MS = 1000
XIDS = {
    13: "graphics engine exception", 31: "memory page fault", 43: "a channel was reset",
    45: "a process was killed on the GPU", 48: "double-bit ECC error", 62: "internal micro-controller halt",
    63: "a memory row is to be remapped", 64: "a memory row could not be remapped", 74: "NVLink error",
    79: "the GPU has fallen off the bus", 92: "many single-bit ECC errors", 94: "contained memory error",
    95: "uncontained memory error", 119: "the GPU system processor does not answer", 145: "NVLink error",
}  # fmt: skip
# What no program causes. A program's own fault, or one that is not listed here, may be the image's.
MACHINE = frozenset({48, 62, 63, 64, 74, 79, 92, 94, 95, 119, 145})
# Names in the library -> text. Events that a release does not have are left out.
TYPES = {
    "nvmlEventTypeXidCriticalError": "Xid",
    "nvmlEventTypeDoubleBitEccError": "uncorrectable ECC error",
    "nvmlEventTypeDramRetirementFailure": "a memory row could not be remapped",
    "nvmlEventTypeFatalPoisonError": "fatal poison error",
    "nvmlEventTypeNonFatalPoisonError": "poison error",
    "nvmlEventTypeGpuUnavailableError": "the GPU is unavailable",
}


def listen(nvml: Any, indices: Collection[int]) -> Iterator[Event | None] | Absence:
    """Faults of some devices, from the moment of this call."""
    listening = ask(nvml, "nvmlEventSetCreate")
    if isinstance(listening, Absence):
        return listening
    for index in indices:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        offered = ask(nvml, "nvmlDeviceGetSupportedEventTypes", handle)
        if isinstance(offered, Absence):
            return offered
        wanted = sum(getattr(nvml, name, 0) & offered for name in TYPES)
        if not wanted:
            return Absence.NOT_SUPPORTED
        refused = ask(nvml, "nvmlDeviceRegisterEvents", handle, wanted, listening)
        if isinstance(refused, Absence):
            return refused
    return _events(nvml, listening)


def _events(nvml: Any, listening: Any) -> Iterator[Event | None]:
    while True:
        try:
            found = nvml.nvmlEventSetWait_v2(listening, WAIT_MS)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                raise
            yield None
            continue
        index, words = int(nvml.nvmlDeviceGetIndex(found.device)), _words(nvml, found)
        of_machine = (
            int(found.eventData) in MACHINE if words.startswith("Xid") else not words.startswith("event")
        )
        yield Event(index=index, what=words, machine=of_machine)


def _words(nvml: Any, found: Any) -> str:
    kind = {getattr(nvml, name, None): words for name, words in TYPES.items()}.get(found.eventType)
    if kind != "Xid":
        return kind or f"event {found.eventType:#x}"
    number = int(found.eventData)
    return f"Xid {number}: {XIDS.get(number, 'see the table of Xids')}"
