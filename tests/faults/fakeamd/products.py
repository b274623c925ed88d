"""AMD's GPUs as the kernel's files show them. In: nothing. Out: one `Product` per kind of GPU.

Nominal figures are those of devices.json; formats are those of the amdgpu and KFD sources.
"""

import dataclasses
from dataclasses import dataclass

# The driver keeps 16 MiB of the memory for itself, so `mem_info_vram_total` is not a round figure.
FIRMWARE_RESERVED_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Product:
    """One GPU as the kernel shows it (for MI250: one of the two dies of a module)."""

    name: str
    device_id: int
    gfx_target_version: int  # decimal major·minor·step: 90402 is gfx942
    compute_units: int
    dies: int  # compute dies (XCC) of one GPU
    hbm_gib: int
    bus_bits: int
    memory_gb_per_s: int
    power_cap_w: int
    xgmi_gbit_per_s: int
    external_revision: int
    pcie_gt_per_s: int = 32
    partitions: tuple[str, ...] = ("SPX", "DPX", "QPX", "CPX")
    memory_modes: tuple[str, ...] = ("NPS1", "NPS4")
    dies_per_module: int = 1
    link_status_refused: bool = True  # xgmi_error is there and cannot be read (ROCm/rocm-systems#11468)

    @property
    def memory_bytes(self) -> int:
        return (self.hbm_gib << 30) - FIRMWARE_RESERVED_BYTES

    @property
    def shader_engines(self) -> int:
        return 8 if self.dies == 1 else 4 * self.dies


MI300X = Product(
    name="MI300X",
    device_id=0x74A1,
    gfx_target_version=90402,
    compute_units=304,
    dies=8,
    hbm_gib=192,
    bus_bits=8192,
    memory_gb_per_s=5300,
    power_cap_w=750,
    xgmi_gbit_per_s=32,
    external_revision=0x46,
)
MI325X = Product(
    name="MI325X",
    device_id=0x74A5,
    gfx_target_version=90402,
    compute_units=304,
    dies=8,
    hbm_gib=256,
    bus_bits=8192,
    memory_gb_per_s=6000,
    power_cap_w=1000,
    xgmi_gbit_per_s=32,
    external_revision=0x46,
)
MI355X = Product(
    name="MI355X",
    device_id=0x75A3,
    gfx_target_version=90500,
    compute_units=256,
    dies=8,
    hbm_gib=288,
    bus_bits=8192,
    memory_gb_per_s=8000,
    power_cap_w=1400,
    xgmi_gbit_per_s=38,
    external_revision=0x50,
    partitions=("SPX", "DPX", "QPX", "CPX"),
    memory_modes=("NPS1", "NPS2"),
)
MI250 = Product(
    name="MI250",
    device_id=0x740C,
    gfx_target_version=90010,
    compute_units=104,
    dies=1,
    hbm_gib=64,
    bus_bits=4096,
    memory_gb_per_s=1638,
    power_cap_w=560,
    xgmi_gbit_per_s=25,
    external_revision=0x3C,
    pcie_gt_per_s=16,
    partitions=(),  # MI200 cannot be partitioned: the files do not exist
    memory_modes=(),
    dies_per_module=2,
    link_status_refused=False,
)
MI210 = dataclasses.replace(MI250, name="MI210", device_id=0x740F, power_cap_w=300, dies_per_module=1)
MI250X_AS_740C = dataclasses.replace(MI250, name="MI250X", compute_units=110)
MI308X = dataclasses.replace(
    MI300X, name="MI308X", device_id=0x74A2, compute_units=80, dies=4, partitions=("SPX", "DPX", "CPX")
)
MI350X = dataclasses.replace(MI355X, name="MI350X", device_id=0x75A0, power_cap_w=1000)
MI325X_GUEST = dataclasses.replace(MI325X, device_id=0x74B9)
MI355X_GUEST = dataclasses.replace(MI355X, device_id=0x75B3)
