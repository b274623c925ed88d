"""The plug-ins with which NCCL and RCCL reach a network. In: the loader's folders. Out: files, versions."""

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

# What is looked for -> its file names. The AWS plug-in is libnccl-net-ofi.so, before 1.14 libnccl-net.so.
LIBRARIES = {
    "libfabric": "libfabric.so*",
    "the plug-in for libfabric": "lib[nr]ccl-net*.so*",
    "rdma-core": "libibverbs.so*",
}
OF_EFA = ("libfabric", "the plug-in for libfabric")
FOLDERS = (
    "/opt/amazon/efa/lib64",
    "/opt/amazon/efa/lib",
    "/opt/amazon/ofi-nccl/lib",
    "/opt/amazon/ofi-nccl/lib64",
)
VERSION = re.compile(rb"(?:NET/OFI|aws-ofi-nccl|libfabric)[ :/-]{1,3}v?(\d+\.\d+\.\d+\w*)")


def found() -> dict[str, dict[str, str]]:
    """For each library its files, and the version that the name or the file says; "" where neither does."""
    folders = list(dict.fromkeys(_folders()))
    return {
        name: {
            str(path): _version(path)
            for folder in folders
            for path in sorted(folder.glob(pattern))
            if path.is_file()
        }
        for name, pattern in LIBRARIES.items()
    }


def _folders() -> Iterator[Path]:
    """Where the loader looks, and where Amazon's installers put their files."""
    listed = (
        subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
        if Path("/sbin/ldconfig").exists()
        else ""
    )
    paths = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    names = (line.rpartition(" => ")[2].rpartition("/")[0] for line in listed.splitlines() if " => " in line)
    yield from (Path(name) for name in (*paths, *names, *FOLDERS) if name and Path(name).is_dir())


def _version(path: Path) -> str:
    named = re.search(r"\.so\.(\d+(?:\.\d+)+)$", path.resolve().name)
    if named:
        return named[1]
    inside = VERSION.search(path.read_bytes())
    return inside[1].decode() if inside else ""
