"""The KFD's topology: two processors, the GPUs, and the links between them.

In: a `HostState`. Out: the tree below /sys/class/kfd. Formats: `kfd_topology.c` of the kernel.
"""

from fakeamd.products import Product
from fakeamd.states import PCIE, XGMI, HostState
from fakeamd.tree import Folder, Link, Refusing, Tree, properties

TOPOLOGY = "class/kfd/kfd/topology"
PROCESSORS = 2  # nodes 0 and 1; GPU g is node 2 + g
HIVE = 0x7D1A8E2B4C5F6071
BUSES = (0x05, 0x26, 0x46, 0x65, 0x85, 0xA6, 0xC6, 0xE5)  # as on an eight-GPU MI300X platform
IDS = (51140, 28851, 23018, 29122, 43178, 45174, 11054, 4209)  # any that are distinct and not zero
UNIQUE_ID = 0xA1B2C3D4E5F60700


def topology(state: HostState) -> Tree:
    """Every node and link of the host."""
    tree: Tree = {
        "devices/virtual/kfd/kfd": Link("class/kfd/kfd"),  # libhsakmt goes this way
        f"{TOPOLOGY}/generation_id": "2",
        f"{TOPOLOGY}/system_properties": properties({"platform_oem": 0, "platform_id": 0, "platform_rev": 0}),
        "class/kfd/kfd/proc": Folder(),
    }
    for processor in range(PROCESSORS):
        tree |= _processor(state, processor)
    for gpu, part in devices(state):
        tree |= _gpu(state, gpu, part)
    return tree


def bound(state: HostState) -> tuple[int, ...]:
    """The GPUs that the driver holds."""
    return tuple(gpu for gpu in range(state.gpus) if gpu not in state.unbound)


def devices(state: HostState) -> tuple[tuple[int, int], ...]:
    """Every device of the driver, a GPU or a part of one: (GPU, number of the part), in the KFD's order."""
    return tuple((gpu, part) for gpu in bound(state) for part in range(state.parts))


def node_of(state: HostState, gpu: int, part: int = 0) -> int:
    """The KFD node of a device; nodes have no gaps."""
    return PROCESSORS + devices(state).index((gpu, part))


def minors(state: HostState) -> tuple[int, ...]:
    """The numbers of the DRM nodes in the container's /dev, from 0."""
    given = range(state.gpus) if state.given is None else state.given
    return tuple(index for index, (gpu, _) in enumerate(devices(state)) if gpu in given)


def processor_of(state: HostState, gpu: int) -> int:
    """Which socket a GPU hangs on: the first, whose memory every process of this machine may use."""
    return 1 if gpu in state.second_socket else 0


def memory_bytes(state: HostState, gpu: int) -> int:
    """What this GPU shows of memory."""
    change = state.changes.get(gpu)
    return change.memory_bytes if change and change.memory_bytes else state.product.memory_bytes


def device_folder(gpu: int) -> str:
    """A GPU's own folder, behind the root port of its bus."""
    bus = BUSES[gpu]
    return f"devices/pci0000:{bus - 1:02x}/0000:{bus - 1:02x}:01.1/{bdf(gpu)}"


def bdf(gpu: int) -> str:
    """A GPU's PCI address."""
    return f"0000:{BUSES[gpu]:02x}:00.0"


def _processor(state: HostState, processor: int) -> Tree:
    here = f"{TOPOLOGY}/nodes/{processor}"
    mine = [device for device in devices(state) if processor_of(state, device[0]) == processor]
    values = dict.fromkeys(_gpu_values(state.product), 0) | {
        "cpu_cores_count": 96,
        "mem_banks_count": 1,
        "io_links_count": 1 + len(mine),
        "cpu_core_id_base": 96 * processor,
        "max_engine_clk_ccompute": 3700,
    }
    tree: Tree = {f"{here}/gpu_id": "0", f"{here}/name": "", f"{here}/properties": properties(values)}
    tree[f"{here}/mem_banks/0/properties"] = _bank(heap=0, size=1 << 40, width=64, clock=4800)
    tree[f"{here}/io_links/0/properties"] = _link(processor, 1 - processor, PCIE, weight=32)
    for index, device in enumerate(mine, start=1):
        tree[f"{here}/io_links/{index}/properties"] = _link(
            processor, node_of(state, *device), PCIE, weight=20
        )
    return tree


def _gpu(state: HostState, gpu: int, part: int) -> Tree:
    here = f"{TOPOLOGY}/nodes/{node_of(state, gpu, part)}"
    minor = devices(state).index((gpu, part))
    links = _links(state, gpu, part)
    values = _gpu_values(state.product) | {
        "simd_count": 4 * state.product.compute_units // state.parts,
        "num_xcc": state.product.dies // state.parts,
        "io_links_count": len(links["io_links"]),
        "p2p_links_count": len(links["p2p_links"]),
        "simd_id_base": (1 << 31) + 4096 * minor,
        # The driver marks the parts of one GPU in the highest bits (kfd_topology.c).
        "location_id": BUSES[gpu] << 8 | part << 28,
        "drm_render_minor": 128 + minor,
        "unique_id": UNIQUE_ID + gpu,
    }
    tree: Tree = {
        f"{here}/gpu_id": str(IDS[gpu] + part),
        f"{here}/name": "ip discovery",
        f"{here}/properties": properties(values),
    }
    if minor not in minors(state):  # the kernel lets no container read a device that it was not given
        tree[f"{here}/properties"] = Refusing("EPERM")
        tree[f"{here}/gpu_id"] = Refusing("EPERM")
    tree[f"{here}/mem_banks/0/properties"] = _bank(
        heap=1, size=memory_bytes(state, gpu) // state.parts, width=state.product.bus_bits, clock=1300
    )
    for level, kib in enumerate((32, 4096, 262144), start=1):
        tree[f"{here}/caches/{level - 1}/properties"] = _cache(level, kib)
    for folder, entries in links.items():
        tree[f"{here}/{folder}"] = Folder()
        tree |= {f"{here}/{folder}/{index}/properties": entry for index, entry in enumerate(entries)}
    return tree


def _links(state: HostState, gpu: int, part: int) -> dict[str, list[str]]:
    """xGMI and the way to the processor are io_links; peer access over PCI Express is a p2p_link."""
    own = node_of(state, gpu, part)
    found = {"io_links": [_link(own, processor_of(state, gpu), PCIE, weight=20)], "p2p_links": []}
    for other, piece in devices(state):
        if (other, piece) == (gpu, part):
            continue
        pair = (min(gpu, other), max(gpu, other))
        target = node_of(state, other, piece)
        if state.pairs.get(pair) == "pcie":
            found["p2p_links"].append(_link(own, target, PCIE, weight=40))
        else:
            found["io_links"].append(_link(own, target, XGMI, weight=15, links=state.links.get(pair, 1)))
    return found


def _gpu_values(product: Product) -> dict[str, int]:
    """One GPU's properties; the library refuses to start without some of them (`hive_id`, `array_count`)."""
    return {
        "cpu_cores_count": 0,
        "simd_count": 4 * product.compute_units,
        "mem_banks_count": 1,
        "caches_count": 3,
        "io_links_count": 0,
        "p2p_links_count": 0,
        "cpu_core_id_base": 0,
        "simd_id_base": 0,
        "max_waves_per_simd": 8,
        "lds_size_in_kb": 64,
        "gds_size_in_kb": 0,
        "num_gws": 64,
        "wave_front_size": 64,
        "array_count": product.shader_engines,
        "simd_arrays_per_engine": 1,
        "cu_per_simd_array": -(-product.compute_units // product.shader_engines),
        "simd_per_cu": 4,
        "max_slots_scratch_cu": 32,
        "gfx_target_version": product.gfx_target_version,
        "vendor_id": 0x1002,
        "device_id": product.device_id,
        "location_id": 0,
        "domain": 0,
        "drm_render_minor": 0,
        "hive_id": HIVE,
        "num_sdma_engines": 2,
        "num_sdma_xgmi_engines": 14 if product.dies > 1 else 3,
        "num_sdma_queues_per_engine": 8,
        "num_cp_queues": 24,
        "max_engine_clk_fcompute": 2100,
        "max_engine_clk_ccompute": 3700,
        "local_mem_size": 0,
        "fw_version": 168,
        "capability": 748055168,
        "debug_prop": 1511,
        "sdma_fw_version": 22,
        "unique_id": 0,
        "num_xcc": product.dies,
    }


def _link(source: int, target: int, kind: int, *, weight: int, links: int = 1) -> str:
    values = {
        "type": kind,
        "version_major": 0,
        "version_minor": 0,
        "node_from": source,
        "node_to": target,
        "weight": weight,
        "min_latency": 0,
        "max_latency": 0,
        "min_bandwidth": 64000,
        "max_bandwidth": 64000 * links,
        "recommended_transfer_size": 0,
        "recommended_sdma_engine_id_mask": 0,
        "flags": 1,
    }
    return properties(values)


def _bank(*, heap: int, size: int, width: int, clock: int) -> str:
    return properties(
        {"heap_type": heap, "size_in_bytes": size, "flags": 0, "width": width, "mem_clk_max": clock}
    )


def _cache(level: int, size_kib: int) -> str:
    values: dict[str, int | str] = {
        "processor_id_low": 1 << 31,
        "level": level,
        "size": size_kib,
        "cache_line_size": 128,
        "cache_lines_per_tag": 1,
        "association": 16,
        "latency": 0,
        "type": 9,
        "sibling_map": "1,0,0,0",
    }
    return properties(values)
