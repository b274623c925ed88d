"""A program: this project's reading of AMD devices through AMD's own Python module of one release.

In: a folder with the package `amdsmi` as the package index has it, and the name of a plan. Out: a JSON line.

The index's package is AMD's Python layer without libamd_smi.so. A stand-in takes the library's place: each
function of AMD's wrapper can be called, fills the wrapper's own structures by the names of their fields, and
answers NOT_SUPPORTED where the plan has no answer. So names, structures, enumerations, renamed keys and
errors are AMD's; the values are made up.
"""

import ctypes
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "acceptance"))

NOT_SUPPORTED, NO_PERM, NO_DATA = 2, 10, 40
GPUS = 2
MEMORY = 192 << 30
XGMI = "XGMI"


class Function:
    """One function of the library. The wrapper sets its types, which a Python function does not need."""

    def __init__(self, answer: Callable[..., int]) -> None:
        self.answer, self.restype, self.argtypes = answer, None, None

    def __call__(self, *arguments: Any) -> int:
        return self.answer(*arguments)


class Library:
    """What `ctypes.CDLL` gives the wrapper."""

    def __init__(self, plan: str) -> None:
        self.plan, self.called = plan, set[str]()

    def __getattr__(self, name: str) -> Function:
        if not name.startswith("amdsmi_"):
            raise AttributeError(name)
        own = getattr(Answers, name.removeprefix("amdsmi_"), None)

        def answer(*arguments: Any) -> int:
            self.called.add(name)
            return own(self.plan, *arguments) if own else NOT_SUPPORTED

        return Function(answer)


def target(pointer: Any) -> Any:
    """The structure behind `byref`, or an array itself."""
    return getattr(pointer, "_obj", pointer)


def fill(pointer: Any, **values: Any) -> int:
    """Set the fields that this release's structure has."""
    structure = target(pointer)
    for name, value in values.items():
        if hasattr(structure, name):
            setattr(structure, name, value)
    return 0


def number(handle: Any) -> int:
    return int(handle.value or 0) - 1000


class Answers:
    """The functions that answer, with the plan first. No `self`: they are looked up on the class."""

    init = staticmethod(lambda _plan, *_a: 0)
    shut_down = staticmethod(lambda _plan, *_a: 0)

    @staticmethod
    def status_code_to_string(_plan: str, _code: Any, _text: Any) -> int:
        return 0

    @staticmethod
    def get_socket_handles(_plan: str, count: Any, handles: Any) -> int:
        target(count).value = GPUS
        for index in range(GPUS if handles else 0):  # a null pointer asks for the count alone
            handles[index] = 1000 + index
        return 0

    @staticmethod
    def get_processor_handles(_plan: str, socket: Any, count: Any, handles: Any) -> int:
        target(count).value = 1
        if handles:
            handles[0] = getattr(socket, "value", socket)
        return 0

    @staticmethod
    def get_lib_version(plan: str, version: Any) -> int:
        structure, text = target(version), ctypes.create_string_buffer(plan.encode())
        kind = {name: kind for name, kind, *_ in structure._fields_}["build"]
        return fill(version, year=25, major=26, minor=0, release=1, build=ctypes.cast(text, kind))

    @staticmethod
    def get_gpu_device_bdf(_plan: str, handle: Any, bdf: Any) -> int:
        return fill(bdf, as_uint=(5 + number(handle)) << 8)

    @staticmethod
    def get_gpu_asic_info(_plan: str, handle: Any, info: Any) -> int:
        serial = f"0xa1b2c3d4e5f6070{number(handle)}".encode()
        return fill(
            info,
            market_name=b"AMD Radeon Graphics",
            vendor_id=0x1002,
            device_id=0x74A1,
            asic_serial=serial,
            num_of_compute_units=304,
            target_graphics_version=0x942,
        )

    @staticmethod
    def get_gpu_memory_total(_plan: str, _handle: Any, _kind: Any, total: Any) -> int:
        target(total).value = MEMORY
        return 0

    @staticmethod
    def get_gpu_memory_usage(_plan: str, _handle: Any, _kind: Any, used: Any) -> int:
        target(used).value = 1 << 28
        return 0

    @staticmethod
    def get_gpu_driver_info(plan: str, _handle: Any, info: Any) -> int:
        shown = {"kernel": b"Linux version 6.12.57 (gcc 14)", "new": b"6.19.14.31400000"}
        return fill(info, driver_version=shown.get(plan, b"6.12.12"), driver_name=b"amdgpu")

    @staticmethod
    def get_gpu_accelerator_partition_profile(plan: str, _handle: Any, profile: Any, _ids: Any) -> int:
        if plan == "no profile":
            return NOT_SUPPORTED  # the module makes profile_type "N/A" of it, and raises nothing
        return fill(profile, profile_type={"cpx": 5}.get(plan, 1), num_partitions=1)

    @staticmethod
    def get_gpu_compute_partition(plan: str, _handle: Any, text: Any, _size: Any) -> int:
        target(text).value = b"CPX" if plan in {"cpx", "no profile"} else b"SPX"
        return 0

    @staticmethod
    def get_gpu_memory_partition(_plan: str, _handle: Any, text: Any, _size: Any) -> int:
        target(text).value = b"NPS1"
        return 0

    @staticmethod
    def get_power_cap_info(_plan: str, _handle: Any, _sensor: Any, info: Any) -> int:
        return fill(info, power_cap=750_000_000, default_power_cap=750_000_000)

    @staticmethod
    def topo_get_link_type(_plan: str, _one: Any, _other: Any, hops: Any, kind: Any) -> int:
        import amdsmi  # type: ignore[import-not-found]

        target(hops).value = 1
        names = {item.name: item.value for item in getattr(amdsmi, "AmdSmiLinkType", ())}
        old = {item.name: item.value for item in getattr(amdsmi, "AmdSmiIoLinkType", ())}
        target(kind).value = names.get("AMDSMI_LINK_TYPE_XGMI", old.get(XGMI, -1))
        return 0

    @staticmethod
    def is_P2P_accessible(plan: str, _one: Any, _other: Any, accessible: Any) -> int:  # noqa: N802
        if plan == "no permission":
            return NO_PERM
        target(accessible).value = True
        return 0

    @staticmethod
    def get_minmax_bandwidth_between_processors(
        _plan: str, _one: Any, _other: Any, least: Any, most: Any
    ) -> int:
        target(least).value, target(most).value = 50_000, 100_000
        return 0

    @staticmethod
    def get_gpu_total_ecc_count(plan: str, _handle: Any, count: Any) -> int:
        if plan == "no permission":
            return NO_PERM
        return fill(count, correctable_count=4, uncorrectable_count=1, deferred_count=2)

    @staticmethod
    def get_temp_metric(_plan: str, _handle: Any, _kind: Any, _metric: Any, value: Any) -> int:
        target(value).value = 45
        return 0


def main() -> None:
    package, plan = Path(sys.argv[1]), sys.argv[2]
    sys.path.insert(0, str(package))
    library, real = Library(plan), ctypes.CDLL
    ctypes.CDLL = lambda name, *a, **k: library if "amd_smi" in str(name) else real(name, *a, **k)  # type: ignore[misc,assignment]
    from vendors import amd, amd_kernel

    amd_kernel.SYS = amd.amd_kernel.SYS = package / "no-sysfs"
    amd_kernel.DEV = package / "no-dev"
    host = amd.read()
    one, link = host.devices[0], host.links[0]
    report = {
        "library": host.library,
        "driver": str(host.driver),
        "devices": len(host.devices),
        "arch": one.arch,
        "compute_units": one.compute_units,
        "pci_id": one.pci_id,
        "uuid": one.uuid,
        "bdf": one.bdf,
        "partition": one.partition,
        "memory_bytes": one.memory_bytes,
        "power_cap_w": one.power.cap_w,
        "uncorrectable": one.ecc.uncorrectable,
        "temperature_c": one.temperature_c,
        "throttle": one.throttle.reading,
        "link": {"kind": link.kind, "p2p": link.p2p, "links": link.links},
        "support": amd.driver_support(host, "7.2.4").state,
        "called": len(library.called),
    }
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
