"""A host with four H200s, shown by a stub of NVML and planted workloads. In: what differs. Out: `Fault`s."""

# ruff: noqa: E501 - the answer of a planted call stays on one line
from typing import Any

from planting import Fault, device_check


def speeds(seconds: str, where: str = "a != b", *, wrong: int = 0) -> str:
    """The result of copies between four devices."""
    pair = f"{{'from': a, 'to': b, 'seconds': [{seconds}] * 5, 'wrong_elements': {wrong}}}"
    pairs = f"[{pair} for a in range(4) for b in range(4) if {where}]"
    return f"lambda: {{'bytes': 400_000_000, 'pairs': {pairs}}}"


def host_speeds(h2d: str = "5e-3", d2h: str = "5e-3", *, devices: int = 4, wrong: str = "0") -> str:
    """The result of copies of 256 MB between the host and four devices."""
    one = f"{{'h2d': [{h2d}] * 5, 'd2h': [{d2h}] * 5, 'wrong_elements': {wrong}}}"
    return f"lambda: {{'bytes': 256_000_000, 'devices': [{one} for i in range({devices})]}}"


# What torch shows on a healthy host of the stub.
SEEN = {
    "workloads.devices:seen": (
        "lambda: [{'index': i, 'arch': 'sm_90', 'compute_units': 132, 'memory_bytes': 143771 << 20,"
        " 'bdf': f'0000:{27 + i:02x}:00.0', 'uuid': None} for i in range(4)]"
    ),
    "workloads.devices:busy_links": "lambda seconds: 1",
    "workloads.devices:peer_copies": (
        "lambda: [{'from': a, 'to': b, 'access': True, 'wrong_elements': 0}"
        " for a in range(4) for b in range(4) if a != b]"
    ),
    "workloads.devices:peer_speeds": speeds("1e-3"),
    "workloads.devices:host_speeds": host_speeds(),
    "workloads.memory:patterns": (
        "lambda share, seconds: [{'device': i, 'bytes': 95 << 30, 'free_bytes': 100 << 30, 'errors': 0,"
        " 'passes': ['own address', 'own address, complement'], 'first': [], 'seconds': 1.0} for i in range(4)]"
    ),
    "vendors.nvidia:torch_runtime": "lambda: '13.0'",
    "vendors.nvidia:requirements": "lambda: ()",
}

# What stays is waited for.
SOON = {"harness.fixtures:GONE_WAIT_S": "1.0", "harness.calls:CLEAN_WAIT_S": "1.0"}


def by_uuid(first: int) -> dict[str, str]:
    """torch that gives no PCI address of a device, only its UUID."""
    named = (
        "lambda: [{**device, 'bdf': None, 'uuid': f'00000000-0000-0000-0000-{number:012d}'}"
        f" for number, device in enumerate(({SEEN['workloads.devices:seen']})(), {first})]"
    )
    return SEEN | {"workloads.devices:seen": named}


READ, SAMPLE = "harness.monitor:Monitor.read_devices", "harness.monitor:Monitor.sample"
STUMBLES = "(_ for _ in ()).throw(__import__('harness.monitor').monitor.MonitorError('a stumble'))"


def nvidia(
    name: str, check: str, says: str = "", outcome: str = "failed", tier: str = "standard", **state: object
) -> Fault:
    return Fault(
        name,
        device_check(check),
        vendor="nvidia",
        nvml=state,
        says=says,
        outcome=outcome,
        patches=SEEN | SOON,
        tier=tier,
    )


def host_copies(name: str, says: str = "", outcome: str = "failed", **copies: Any) -> Fault:
    return Fault(
        name, device_check("test_host_bandwidth"), outcome, says, vendor="nvidia", nvml={},
        patches=SEEN | {"workloads.devices:host_speeds": host_speeds(**copies)},
    )  # fmt: skip
