"""The fabricated hosts as data: which GPUs, and what is wrong with them. In: nothing. Out: `STATES`, by name.

sysfs.py and kfd.py turn a state into files.
"""

# ruff: noqa: E501 - a table of cases reads in rows
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fakeamd.gpu_metrics import Value
from fakeamd.products import (
    MI210,
    MI250,
    MI250X_AS_740C,
    MI300X,
    MI308X,
    MI325X,
    MI325X_GUEST,
    MI350X,
    MI355X,
    MI355X_GUEST,
    Product,
)
from fakeamd.tree import Entry, Fifo

XGMI, PCIE = 11, 2  # KFD's io-link types (`CRAT_IOLINK_TYPE_*`)
LinkKind = Literal["xgmi", "pcie"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """What differs on one GPU: files of its device folder, fields of its gpu_metrics."""

    files: Mapping[str, Entry | None] = field(default_factory=dict)  # None: the file does not exist
    metrics: Mapping[str, Value] = field(default_factory=dict)
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Counting:
    """A text file of one GPU that changes once, some time after it was first read."""

    gpu: int
    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Moving:
    """Accumulators of one GPU's gpu_metrics that grow by so much every 10 ms, as the firmware moves them."""

    gpu: int
    step: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class HostState:
    """One host; by default eight healthy GPUs of one product."""

    name: str
    product: Product
    gpus: int = 8
    changes: Mapping[int, Change] = field(default_factory=dict)
    pairs: Mapping[tuple[int, int], LinkKind] = field(default_factory=dict)  # links that are not xGMI
    second_socket: tuple[int, ...] = ()
    unbound: tuple[int, ...] = ()  # on the PCI bus, but no driver holds them
    host_files: Mapping[str, Entry | None] = field(default_factory=dict)  # below /sys
    counting: tuple[Counting, ...] = ()
    moving: tuple[Moving, ...] = ()
    reports: Mapping[int, str] = field(default_factory=dict)  # GPU -> line of its KFD's SMI events
    driver_loaded: bool = True
    driver: str | None = "6.12.12"  # what the module shows; None: the kernel's own, which has no version
    # Which GPUs the container was given: for the others sysfs has everything but the KFD's node (EPERM), and
    # /dev no render node.
    given: tuple[int, ...] | None = None
    compute: str = "SPX"
    memory: str = "NPS1"
    links: Mapping[tuple[int, int], int] = field(default_factory=dict)  # pair -> xGMI links, where not 1
    user: int = 0  # the uid that runs the command; the device nodes belong to root and the render group

    @property
    def parts(self) -> int:
        """How many devices each GPU is."""
        return {"SPX": 1, "DPX": 2, "QPX": 4, "CPX": self.product.dies}[self.compute]


def _one(product: Product, name: str, gpu: int, change: Change) -> HostState:
    return HostState(name=name, product=product, changes={gpu: change})


def _errors(uncorrectable: int = 0, correctable: int = 0, deferred: int = 0) -> str:
    return f"ue: {uncorrectable}\nce: {correctable}\nde: {deferred}"


HEALTHY = (
    HostState(name="mi300x", product=MI300X),
    HostState(name="mi325x", product=MI325X),
    # Two dies of one module have four links, and some neighbours two (arXiv 2302.14827).
    HostState(name="mi250", product=MI250, links={(0, 1): 4, (2, 3): 4, (4, 5): 4, (6, 7): 4, (0, 2): 2, (1, 3): 2, (4, 6): 2, (5, 7): 2}),
    HostState(name="mi355x", product=MI355X),
    HostState(name="mi210", product=MI210, gpus=4),
    HostState(name="mi210-alone", product=MI210, gpus=1),
    HostState(name="mi210-without-bridge", product=MI210, gpus=4, pairs=dict.fromkeys(itertools.combinations(range(4), 2), "pcie")),
    HostState(name="mi308x", product=MI308X, driver="6.16.13"),
    HostState(name="mi350x", product=MI350X, driver="6.19.14.31400000"),
    HostState(name="mi250x-as-740c", product=MI250X_AS_740C),
    HostState(name="mi325x-guest", product=MI325X_GUEST),
    HostState(name="mi355x-guest", product=MI355X_GUEST, driver="7.1.3.31500000"),
    HostState(name="driver-31.60", product=MI300X, driver="7.4.1.31600000"),
    HostState(name="driver-of-the-kernel", product=MI300X, driver=None),
    HostState(name="capped-in-events", product=MI250, reports={3: "2 2:1"}),  # the bit of the power cap
    HostState(name="two-of-eight", product=MI300X, given=(2, 5)),
    HostState(name="mi300x-cpx-nps4", product=MI300X, gpus=1, compute="CPX", memory="NPS4"),
)  # fmt: skip

LINK_DOWN = 2  # GPU 3's third link leads to GPU 2; the other end is GPU 2's third

FAULTS = (
    HostState(name="gpu-missing", product=MI300X, unbound=(6,)),
    HostState(name="ecc-during-run", product=MI300X, counting=(Counting(gpu=3, path="ras/umc_err_count", text=_errors(2, 17, 1)),)),
    _one(MI300X, "ecc-before-run", 3, Change(files={"ras/umc_err_count": _errors(2, 17, 1)})),
    _one(MI300X, "pcie-x8", 3, Change(files={"current_link_width": "8"}, metrics={"pcie_link_width": 8, "pcie_replay_count_acc": 9})),
    HostState(
        name="xgmi-link-down",
        product=MI300X,
        changes={
            3: Change(metrics={"xgmi_link_status": [1, 1, 0, 1, 1, 1, 1, 0xFFFF]}),
            2: Change(metrics={"xgmi_link_status": [1, 1, 0, 1, 1, 1, 1, 0xFFFF]}),
        },
    ),
    HostState(name="xgmi-error", product=MI300X, counting=(Counting(gpu=3, path="ras/xgmi_wafl_err_count", text=_errors(0, 2, 0)),)),
    _one(MI250, "xgmi-error-mi250", 3, Change(files={"xgmi_error": "1"})),
    HostState(name="page-fault", product=MI300X, reports={3: "1 1089:python3"}),
    HostState(name="hot-in-events", product=MI250, reports={3: "2 1000000002:1"}),  # hotspot, and the cap
    HostState(name="reset", product=MI300X, reports={5: "3 2"}),
    HostState(name="pcie-pair", product=MI300X, pairs={(2, 5): "pcie"}),
    _one(MI300X, "power-cap-lowered", 3, Change(files={"hwmon/hwmon3/power1_cap": "550000000"})),
    HostState(name="throttling", product=MI300X, moving=(Moving(gpu=3, step={"accumulation_counter": 10, "prochot_residency_acc": 5}),)),
    _one(MI250, "throttling-mi250", 3, Change(metrics={"throttle_status": 1 << 9, "indep_throttle_status": 1 << 36})),
    _one(MI300X, "nps4", 3, Change(files={"current_memory_partition": "NPS4"})),
    _one(MI300X, "cpx", 3, Change(files={"current_compute_partition": "CPX"})),
    _one(MI300X, "bad-pages", 3, Change(files={"ras/gpu_vram_bad_pages": "0x00000001 : 0x00001000 : R\n0x00000002 : 0x00001000 : P"})),
    _one(MI325X, "memory-short", 3, Change(memory_bytes=MI300X.memory_bytes)),
    _one(MI300X, "firmware-differs", 3, Change(files={"fw_version/mec_fw_version": "0x000000a9"})),
    HostState(name="numa-elsewhere", product=MI300X, second_socket=(3,)),
    _one(MI355X, "pcie-gen4-mi355x", 3, Change(files={"current_link_speed": "16.0 GT/s PCIe"}, metrics={"pcie_link_speed": 160})),
    _one(MI210, "pcie-gen3-mi210", 3, Change(files={"current_link_speed": "8.0 GT/s PCIe"}, metrics={"pcie_link_speed": 80})),
    _one(MI325X, "ecc-deferred-mi325x", 3, Change(files={"ras/umc_err_count": _errors(0, 0, 2)})),
    _one(MI210, "ecc-before-run-mi210", 3, Change(files={"ras/umc_err_count": _errors(1)})),
    _one(MI355X, "bad-pages-mi355x", 3, Change(files={"ras/gpu_vram_bad_pages": "0x00000002 : 0x00001000 : P\n0x00000003 : 0x00001000 : F"})),
    HostState(name="ecc-during-run-mi355x", product=MI355X, counting=(Counting(gpu=5, path="ras/umc_err_count", text=_errors(1)),)),
    HostState(name="xgmi-error-mi325x", product=MI325X, counting=(Counting(gpu=3, path="ras/xgmi_wafl_err_count", text=_errors(1, 0, 0)),)),
    HostState(name="pcie-pair-mi355x", product=MI355X, pairs={(0, 7): "pcie"}),
    _one(MI355X, "power-cap-mi355x", 3, Change(files={"hwmon/hwmon3/power1_cap": "1000000000"})),
    _one(MI250, "power-cap-mi250", 2, Change(files={"hwmon/hwmon2/power1_cap": "500000000"})),
    *(
        HostState(
            name=f"throttling-{name}",
            product=MI300X,
            moving=(Moving(gpu=3, step={"accumulation_counter": 10, f"{name}_residency_acc": 5}),),
        )
        for name in ("socket_thm", "vr_thm", "hbm_thm")
    ),
    _one(MI355X, "nps2-mi355x", 3, Change(files={"current_memory_partition": "NPS2"})),
    _one(MI300X, "dpx", 3, Change(files={"current_compute_partition": "DPX"})),
    _one(MI355X, "firmware-differs-mi355x", 3, Change(files={"fw_version/sdma_fw_version": "0x00000001"})),
    HostState(name="gpu-missing-mi210", product=MI210, gpus=4, unbound=(1,)),
    HostState(name="page-fault-mi250", product=MI250, reports={1: "1 1089:python3"}),
    HostState(name="reset-mi355x", product=MI355X, reports={0: "3 2"}),
    HostState(name="driver-too-old", product=MI300X, driver="6.7.0"),
    HostState(name="permission-denied", product=MI300X, user=1000),
    HostState(name="driver-not-loaded", product=MI300X, driver_loaded=False),
    HostState(name="init-hangs", product=MI300X, host_files={"class/kfd/kfd/topology/nodes/4/properties": Fifo()}),
)  # fmt: skip

STATES: Mapping[str, HostState] = {state.name: state for state in (*HEALTHY, *FAULTS)}
