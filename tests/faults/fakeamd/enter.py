"""Inside the new namespaces: mount the fabricated host over the root file system, then run the command in it.

In: one JSON argument, the fields of `host.Entry`. Out: the command's own exit code. Started by host.py only.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from fakeamd import board, kfd, recorded, sysfs, tree
from fakeamd.moving import movers
from fakeamd.rootfs import MOUNT_POINT
from fakeamd.states import STATES, HostState

KFD_MAJOR = 510
RENDER_GROUP = 105
SHARED_MEMORY = "16g"  # the limit on a healthy host; it takes no memory
PLAIN_NODES = {"null": (1, 3), "zero": (1, 5), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
FACTS = "run/fakeamd"  # what the shim answers with, one file a GPU


def main() -> int:
    entry: dict[str, Any] = json.loads(sys.argv[1])
    root = Path(entry["root"])
    files = recorded.load(Path(entry["recorded"])) if entry["recorded"] else None
    state = STATES[entry["state"]] if files is None else recorded.state(files)
    _mount_over(root)
    _bind(root, entry["binds"], entry["writable"])
    for name, file in entry["over"].items():
        _mount("--bind", file, root / MOUNT_POINT / name)
    below = sysfs.tree(state, entry["metrics_revision"]) if files is None else recorded.tree(files)
    tree.write(root / "sys", below)
    _make_nodes(root / "dev", state)
    _write_facts(root / FACTS, state)
    shutil.copy(entry["shim"], root / FACTS / "shim.so")
    for mover in movers(state, root / "sys", entry["metrics_revision"]):
        threading.Thread(target=mover, daemon=True).start()
    return subprocess.run(_command(entry, state, root), check=False).returncode


def _command(entry: dict[str, Any], state: HostState, root: Path) -> list[str]:
    environment = {
        "PATH": "/usr/bin:/usr/sbin",
        "HOME": "/tmp",
        "LC_ALL": "C.UTF-8",
        "LD_PRELOAD": f"/{FACTS}/shim.so",
        "PYTHONDONTWRITEBYTECODE": "1",
        **entry["environment"],
    }
    assignments = [f"{name}={value}" for name, value in environment.items()]
    user = f"--userspec={state.user}:{state.user}"
    return ["chroot", user, "--groups=", str(root), "env", "-i", *assignments, *entry["command"]]


def _mount_over(root: Path) -> None:
    """Mount the root file system read-only, as in a container, with memory for the parts that a host
    fills.
    """
    _mount("--bind", root, root)
    _mount("-o", "remount,bind,ro", root)
    _mount("-t", "proc", "proc", root / "proc")
    for name, options in (
        ("sys", "mode=755"),
        ("dev", "mode=755"),
        ("run", "mode=755"),
        ("tmp", "mode=1777"),
        (MOUNT_POINT, "mode=755"),
    ):
        _mount("-t", "tmpfs", "-o", options, "none", root / name)


def _bind(root: Path, binds: dict[str, str], writable: list[str]) -> None:
    for name, folder in binds.items():
        target = root / MOUNT_POINT / name
        target.mkdir(exist_ok=True)  # a folder inside another one that is bound is there already
        _mount("--bind", folder, target)
        if name not in writable:
            _mount("-o", "remount,bind,ro", target)


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *map(str, arguments)], check=True)


def _make_nodes(dev: Path, state: HostState) -> None:
    """Real character devices without a driver; the shim answers for them."""
    (dev / "shm").mkdir()
    _mount("-t", "tmpfs", "-o", f"mode=1777,size={SHARED_MEMORY}", "none", dev / "shm")
    (dev / "dri").mkdir()
    (dev / "fd").symlink_to("/proc/self/fd")
    for name, (major, minor) in PLAIN_NODES.items():
        _node(dev / name, major, minor, mode=0o666, group=0)
    if not state.driver_loaded:
        return
    _node(dev / "kfd", KFD_MAJOR, 0, mode=0o660, group=RENDER_GROUP)
    for index in kfd.minors(state):
        for name, minor in ((f"card{index}", index), (f"renderD{128 + index}", 128 + index)):
            _node(dev / "dri" / name, sysfs.DRM_MAJOR, minor, mode=0o660, group=RENDER_GROUP)


def _node(path: Path, major: int, minor: int, *, mode: int, group: int) -> None:
    os.mknod(path, stat.S_IFCHR | mode, os.makedev(major, minor))
    path.chmod(mode)  # the umask narrows the mode of mknod
    os.chown(path, 0, group)


def _write_facts(folder: Path, state: HostState) -> None:
    folder.mkdir(parents=True)
    product = state.product
    for index, (gpu, _) in enumerate(kfd.devices(state)):
        facts = {
            "device_id": product.device_id,
            "external_revision": product.external_revision,
            "shader_engines": product.shader_engines,
            "compute_units": product.compute_units // state.parts,
            "bus_bits": product.bus_bits,
            "memory_bytes": kfd.memory_bytes(state, gpu),
            "used_bytes": board.USED_BYTES,
        }
        (folder / str(index)).write_text(tree.properties(facts) + "\n", encoding="utf-8")
    for gpu, line in state.reports.items():
        (folder / f"event-{kfd.IDS[gpu]}").write_text(line + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
