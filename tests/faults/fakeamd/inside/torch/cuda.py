"""The devices of the stand-in for torch. In: $FAKEHIP. Out: HIP's answers, as torch gives them."""

import ctypes
import functools
import os
from types import SimpleNamespace

FACTS = 160


@functools.cache
def library() -> ctypes.CDLL:
    """The stand-in for libamdhip64, opened when it is first asked, as HIP reads its variables then."""
    hip = ctypes.CDLL(os.environ["FAKEHIP"])
    for name in ("fakehip_affine", "fakehip_different"):
        getattr(hip, name).argtypes = [ctypes.c_longlong] * (4 if name == "fakehip_affine" else 3)
    return hip


@functools.cache
def _stream() -> ctypes.c_void_p:
    made = ctypes.c_void_p()
    done(library().hipStreamCreate(ctypes.byref(made)))
    return made


def done(code: int) -> None:
    """Raise what torch raises when HIP refuses a call."""
    if code:
        raise RuntimeError(f"HIP error {code}")


def is_initialized() -> bool:
    return library.cache_info().currsize > 0


def is_available() -> bool:
    return device_count() > 0


def _is_in_bad_fork() -> bool:
    return False


def empty_cache() -> None:
    pass


def device_count() -> int:
    if "FAKEHIP" not in os.environ:
        return 0
    count = ctypes.c_int()
    library().hipGetDeviceCount(ctypes.byref(count))
    return count.value


def get_device_properties(index: int) -> SimpleNamespace:
    """With the fields of torch 2.9 on ROCm; the UUID is the unique id's letters, printed as bytes."""
    raw, facts = ctypes.create_string_buffer(16), ctypes.create_string_buffer(FACTS)
    done(library().hipDeviceGetUuid(raw, index))
    done(library().fakehip_facts(facts, FACTS, index))
    bdf, arch, units, memory = facts.value.decode().split("|")
    domain, bus, rest = bdf.split(":")
    text = raw.raw.hex()
    return SimpleNamespace(
        gcnArchName=f"{arch}:sramecc+:xnack-",
        multi_processor_count=int(units),
        total_memory=int(memory),
        pci_domain_id=int(domain, 16),
        pci_bus_id=int(bus, 16),
        pci_device_id=int(rest.partition(".")[0], 16),
        uuid="-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:])),
    )


def can_device_access_peer(device: int, peer: int) -> bool:
    can = ctypes.c_int()
    done(library().hipDeviceCanAccessPeer(ctypes.byref(can), device, peer))
    return bool(can.value)


def synchronize(device: int | None = None) -> None:
    if device is not None:
        done(library().hipSetDevice(device))
    done(library().hipStreamSynchronize(_stream()))


def number(device: object) -> int | None:
    """ "cuda:3" is 3; None is the host."""
    return None if device is None else int(str(device).rpartition(":")[2])


def allocated(device: int | None, size: int) -> int:
    """The address of memory on a device."""
    made = ctypes.c_void_p()
    done(library().hipSetDevice(device))
    done(library().hipMalloc(ctypes.byref(made), ctypes.c_size_t(size)))
    assert made.value
    return made.value


def freed(address: int) -> None:
    done(library().hipFree(ctypes.c_void_p(address)))


def copied(target: tuple[int, int | None], source: tuple[int, int | None], size: int) -> None:
    """By hipMemcpyPeerAsync between two devices, else by hipMemcpyAsync with the kind of copy."""
    (to, on), (begin, of) = target, source
    places = ctypes.c_void_p(to), ctypes.c_void_p(begin), ctypes.c_size_t(size)
    if on is not None and of is not None and on != of:
        done(library().hipMemcpyPeerAsync(places[0], on, places[1], of, places[2], _stream()))
        return
    kind = (1 if on is not None else 0) + (2 if of is not None else 0)
    done(library().hipMemcpyAsync(*places, kind, _stream()))
