"""Faults that AMD's driver reports. In: amdsmi's event reader. Out: `Event`s as they come.

The library passes on the KFD's SMI events, a line per event: memory fault, reset, throttling (kernel:
kfd_smi_events.c). The kinds that a release knows are found by name.

An event of throttling has the reasons as bits, and MI200 sends it also for the power cap alone
(aldebaran_ppt.c): only a reason that makes a machine unfit is a fault.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from vendors import Absence, Event, amd_kernel
from vendors.amd_library import answer, ask

WAIT_MS = 1000
FAULTS = {
    "VMFAULT": "a memory page fault",
    "THERMAL_THROTTLE": "thermal throttling",
    "GPU_PRE_RESET": "the GPU is being reset",
    "GPU_POST_RESET": "the GPU was reset",
    "RING_HANG": "a queue hung",
}
# What no program causes, unless it had a page fault or hung a queue before: then that is reported too.
MACHINE = ("THERMAL_THROTTLE", "GPU_PRE_RESET", "GPU_POST_RESET")


def listen(smi: Any, handles: Mapping[int, Any]) -> Iterator[Event | None] | Absence:
    """Faults of some devices, from the moment of this call."""
    kinds = getattr(smi, "AmdSmiEvtNotificationType", ())
    wanted = [kind for kind in kinds if kind.name in FAULTS]
    readers = [ask(smi, "AmdSmiEventReader", handle, wanted) for handle in handles.values()]
    absent = [reader for reader in readers if isinstance(reader, Absence)]
    return absent[0] if absent else _events(smi, readers, handles)


def is_unfit(detail: str) -> bool:
    """Whether the reasons of a throttling make a machine unfit; yes where the text does not have them.

    The KFD writes "bits:count" in hexadecimal, and libamd_smi 10.1 makes "bitmask: 0x2 counter: 0x1" of it.
    """
    bits = re.search(r"(?:bitmask:\s*)?(?:0x)?([0-9a-fA-F]+)\s*(?::|counter)", detail)
    word = int(bits[1], 16) if bits else 0
    normal = sum(1 << bit for bit in amd_kernel.NORMAL_THROTTLES)
    return word == 0 or bool(word & ~normal)


def _events(smi: Any, readers: Sequence[Any], handles: Mapping[int, Any]) -> Iterator[Event | None]:
    """One reader returns the events of all devices that were registered."""
    while True:
        found = answer(smi, readers[0].read, WAIT_MS)
        if not found or isinstance(found, Absence):  # NO_DATA: nothing in this second
            yield None
            continue
        for event in found:
            words = FAULTS.get(event["event"], event["event"])
            detail = " ".join(str(event["message"]).split())
            if event["event"] == "THERMAL_THROTTLE" and not is_unfit(detail):
                continue
            yield Event(
                index=_index(event["processor_handle"], handles),
                what=f"{words} ({detail})",
                machine=event["event"] in MACHINE,
            )


def _index(handle: Any, handles: Mapping[int, Any]) -> int:
    """The device with this handle.
    Handles are pointers: two objects with one address do not compare equal.
    """
    wanted = getattr(handle, "value", handle)
    return next((index for index, one in handles.items() if getattr(one, "value", one) == wanted), -1)
