"""The kernel's files of an AMD host, as a user can show them. In: /sys. Out: JSON values without identities.

These are the files that AMD's management library and the suites read, by name, so that the tests can make a
host of them (`tests/faults/fakeamd/recorded.py`). Serial numbers are left out; the numbers of GPUs and hives
are replaced by 1, 2, 3, by which devices still differ.
"""

import base64
import errno
import fnmatch
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

SYS = Path("/sys")
AMD, DISPLAY, ACCELERATOR = "0x1002", "0x03", "0x12"
BINARY = {"gpu_metrics": 1 << 16, "config": 64}  # and no serial number, which is further on in `config`
LARGEST = 1 << 16
# Below a GPU's folder. What is not named here never leaves the host.
OF_A_GPU = (
    *("available_*_partition", "current_*_partition", "current_link_*", "max_link_*", "board_info", "class"),
    *("compute_partition_config/*", "config", "device", "vendor", "revision", "subsystem_*", "uevent"),
    *("df_cntr_avail", "drm/*/dev", "drm/*/uevent", "enforce_isolation", "fw_version/*", "gpu_busy_percent"),
    *("gpu_metrics", "hwmon/*/freq*", "hwmon/*/name", "hwmon/*/power*", "hwmon/*/temp*", "local_cpulist"),
    *("manufacturer", "mem_*", "numa_node", "pcie_*", "power_dpm_*", "pp_*", "product_name", "ras/*"),
    *("thermal_throttling_logging", "unique_id", "vbios_version", "xgmi_*"),
)
OF_A_PART = ("drm/*/dev", "drm/*/uevent")
OF_THE_HOST = {
    "class/kfd/kfd/topology": ("*",),
    "module/amdgpu": ("version", "srcversion", "initstate", "refcnt"),
}
LINKS = ("bus/pci/devices/*", "bus/pci/drivers/amdgpu/*", "class/drm/*", "class/hwmon/*", "dev/char/226:*")
LINKS_OF_A_GPU = ("driver", "subsystem", "drm/*/device", "xgmi_hive_info/node*")
NUMBERS = re.compile(r"^(?:unique_id|hive_id) (\d+)$", re.MULTILINE)


def record() -> dict[str, object]:
    """Path below /sys -> its text, or an object: base64 `bytes`, a `link`, an empty `folder`, a `refused`."""
    found: dict[str, object] = dict(_files())
    numbers = _numbers(found)
    return {path: _anonymous(value, numbers) for path, value in sorted(found.items())}


def identities() -> tuple[str, ...]:
    """Every serial number and identity of this host's GPUs, as texts: no file for others may have one."""
    files = [path for gpu in _gpus() for path in (gpu / "serial_number", gpu / "fru_id", gpu / "unique_id")]
    told = [str(found) for path in files if isinstance(found := _read(path), str)]
    return tuple({text for text in (*told, *_numbers(dict(_files()))) if len(text) > 3})


def _files() -> Iterator[tuple[str, object]]:
    gpus, parts = _gpus(), sorted(SYS.glob("devices/platform/amdgpu_xcp*"))
    folders = {**{SYS / path: names for path, names in OF_THE_HOST.items()}}
    folders |= {**dict.fromkeys(gpus, OF_A_GPU), **dict.fromkeys(parts, OF_A_PART)}
    for folder, names in folders.items():
        for path in sorted(folder.rglob("*")):
            if any(fnmatch.fnmatchcase(str(path.relative_to(folder)), name) for name in names):
                yield from _entry(path)
    for folder in (*gpus, *parts):
        for name in LINKS_OF_A_GPU:
            yield from _links(folder, name)
    for name in LINKS:
        yield from (
            (path, link) for path, link in _links(SYS, name) if _is_amd(link["link"], (*gpus, *parts))
        )


def _gpus() -> list[Path]:
    """The folders of AMD's GPUs on the PCI bus, with or without a driver."""
    every = [path.resolve() for path in sorted((SYS / "bus/pci/devices").glob("*"))]
    return [
        path
        for path in every
        if _read(path / "vendor") == AMD and str(_read(path / "class")).startswith((DISPLAY, ACCELERATOR))
    ]


def _entry(path: Path) -> Iterator[tuple[str, object]]:
    place = str(path.relative_to(SYS))
    if path.is_dir() and not path.is_symlink():
        if not any(path.iterdir()):
            yield place, {"folder": True}
    elif path.is_file() and not path.is_symlink():
        found = _read(path)
        if found is not None:
            yield place, found


def _links(folder: Path, name: str) -> Iterator[tuple[str, dict[str, str]]]:
    for path in sorted(folder.glob(name)):
        if path.is_symlink() and path.resolve().is_relative_to(SYS.resolve()):
            yield str(path.relative_to(SYS)), {"link": str(path.resolve().relative_to(SYS.resolve()))}


def _is_amd(target: str, folders: tuple[Path, ...]) -> bool:
    return any((SYS / target).is_relative_to(folder) for folder in folders)


def _read(path: Path) -> object:
    """A text, an object for what is no text, or None where no process may read."""
    try:
        body = path.read_bytes()[: BINARY.get(path.name, LARGEST)]
    except OSError as error:
        return (
            {"refused": errno.errorcode[error.errno]} if error.errno in {errno.EINVAL, errno.EPERM} else None
        )
    if path.name in BINARY:
        return {"bytes": base64.b64encode(body).decode()}
    return body.decode("utf-8", "replace").rstrip("\n")


def _numbers(found: Mapping[str, object]) -> dict[str, str]:
    """Each identity, as the kernel writes it in decimal and hexadecimal -> its place in order, likewise."""
    texts = [text for path, text in sorted(found.items()) if isinstance(text, str) and "/nodes/" in path]
    files = [
        text for path, text in sorted(found.items()) if isinstance(text, str) and path.endswith("/unique_id")
    ]
    values = [int(number) for text in texts for number in NUMBERS.findall(text)]
    values += [int(text, 16) for text in files]
    places = {value: place for place, value in enumerate(dict.fromkeys(filter(None, values)), start=1)}
    forms = (str, "{:x}".format, "{:016x}".format)
    return {form(value): form(place) for value, place in places.items() for form in forms}


def _anonymous(value: object, numbers: Mapping[str, str]) -> object:
    if not isinstance(value, str):
        return value
    for known, place in sorted(numbers.items(), key=lambda pair: -len(pair[0])):
        value = re.sub(rf"(?<![0-9a-fA-F]){known}(?![0-9a-fA-F])", place, value)
    return value
