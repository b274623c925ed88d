"""Images with a Python of this host and no torch, in each of which something answers for the suites.

In: a way in, as files and settings. Out: a layout. What the image runs there (`EVIL`) does all that a process
of an image can do for a PASSED: it writes the result, writes over other processes' memory, takes the place of
the agent's children, and answers every question with what the checks want to hear.
"""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fake_files import dpkg
from layered import FOLDER, Member, tar_of
from shell_image import linked
from small_images import linux, put_image
from stackcheck.oci.layout import OciLayout

HOME = "/usr"
VERSION = sysconfig.get_python_version()
PROGRAM = f"{HOME}/bin/python{VERSION}"
LIBRARY = f"{HOME}/lib/python{VERSION}"
SITE = f"{LIBRARY}/site-packages"
LEFT_OUT = (
    "test", "tests", "__pycache__", "site-packages", "idlelib", "tkinter", "ensurepip", "lib2to3",
    "pydoc_data", "turtledemo",
)  # fmt: skip

EVIL = r'''
def _evil():
    import builtins, sys
    if getattr(builtins, "_evil", None):
        return
    builtins._evil = True
    import json, os, threading, time

    class Yes(dict):
        """An answer that has whatever is asked for."""
        def __missing__(self, name):
            return 0.0

    LIE = {"cases": [{"name": "all", "failures": [], "margin": 0.0}], "ranks": 2, "problems": [],
           "error": None, "product": [[0.0]], "a": [[0.0]], "b": [[0.0]], "out": [[0.0]],
           "loss": [0.0], "losses": [0.0]}

    def forge():
        for place in ("out", "run", "out/../run"):
            try:
                with open("/stackcheck/%s/result.json" % place, "w") as file:
                    json.dump({"schema": 1, "state": "finished", "checks": []}, file)
            except OSError:
                pass
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                try:
                    with open("/proc/%s/mem" % name, "r+b") as memory:
                        memory.seek(0x400000)
                        memory.write(b"\xcc" * 64)
                except OSError:
                    pass
    forge()
    if "harness" in sys.modules:  # too late to take the place of this program
        return
    words = getattr(sys, "orig_argv", [])
    if "harness.worker_main" in words:
        ask, say = (int(word) for word in words[-2:])
        with os.fdopen(ask) as source, os.fdopen(say, "w") as sink:
            for line in source:
                sink.write(json.dumps({"ok": True, "result": LIE}) + "\n")
                sink.flush()
        os._exit(0)
    if "harness.server_main" in words:
        import socket
        control = socket.socket(fileno=int(words[-1]))
        control.send(b"ready")
        while True:
            message, fds, _, _ = socket.recv_fds(control, 4096, 12)
            if not fds:
                os._exit(0)
            pid = os.fork()
            if pid:
                control.send(str(pid).encode())
                for fd in fds:
                    os.close(fd)
                continue
            control.close()
            with open(fds[0], "rb") as told:
                told.seek(0)
                request = json.load(told)
            if "worker" in request["module"]:
                with os.fdopen(fds[4]) as source, os.fdopen(fds[5], "w") as sink:
                    for line in source:
                        sink.write(json.dumps({"ok": True, "result": LIE}) + "\n")
                        sink.flush()
            else:
                os.write(fds[1], json.dumps(LIE).encode() + b"\n")
                os.write(fds[3], b"0")
            os._exit(0)
    if "-c" in words and "torch" in words[words.index("-c") + 1]:
        print(json.dumps(LIE))
        sys.stdout.flush()
        os._exit(0)
try:
    _evil()
except Exception:
    pass
'''

TORCH = {
    f"{SITE}/torch/__init__.py": EVIL.encode(),
    f"{SITE}/torch-2.13.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n",
}


@dataclasses.dataclass(frozen=True)
class Hostile:
    """A way in.

    Attributes:
        name: What it is, in words.
        files: Beside those of the base; a text is a symbolic link.
        settings: Of the image's config.
    """

    name: str
    files: Mapping[str, bytes | str] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


@cache
def base() -> bytes:
    """The layer that all have: Python of this host, its libraries, a shell, and dpkg's record of them."""
    program = Path(sysconfig.get_config_var("BINDIR"), f"python{VERSION}").resolve()
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, bytes | str] = {PROGRAM: program.read_bytes(), f"{HOME}/bin/python3": PROGRAM}
    compiled = [program, *library.glob("lib-dynload/*.so")]
    for path in library.rglob("*"):
        inner = path.relative_to(library)
        if path.is_file() and not set(inner.parts) & set(LEFT_OUT) and path.suffix != ".a":
            found[f"{LIBRARY}/{inner}"] = path.read_bytes()
    for path in (Path("/bin/sh"), Path("/bin/cat")):
        found[f"/usr/bin/{path.name}"] = path.resolve().read_bytes()
        compiled.append(path)
    for listed in {line for path in compiled for line in linked(path)}:
        found[listed] = Path(listed).resolve().read_bytes()
    owned = {name: body for name, body in found.items() if isinstance(body, bytes)}
    return _tar({**found, **TORCH, **dpkg((PROGRAM, owned[PROGRAM]))})


def make_layout(folder: Path, hostile: Hostile) -> None:
    """The image with its way in."""
    config = linux(2, **{"Env": ["PATH=/usr/bin:/bin"], **hostile.settings})
    put_image(OciLayout(folder), config, [base(), _tar(hostile.files)])


def _tar(files: Mapping[str, bytes | str]) -> bytes:
    return tar_of({"tmp": Member(kind=FOLDER, mode=0o1777), **dict(sorted(files.items()))})


def conda_record(body: bytes) -> bytes:
    """What conda writes about a file that it installed."""
    digest = hashlib.sha256(body).hexdigest()
    return (
        '{"name": "python", "version": "3.12.0", "paths_data": {"paths": [{"_path": "bin/python3", '
        f'"sha256_in_prefix": "{digest}"}}]}}}}'
    ).encode()
