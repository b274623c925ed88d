"""A site's mirror of all that ROCm stacks are made from, on this machine: indexes, archives, a registry.

In: stacks, an address that containers reach, a registry. Out: a tree that a web server of this module serves
(PEP 503 pages, signed apt archives), bases in the registry, and a `mirrors.yaml` that leads there. The two
package indexes ask for a login, as a site's do.
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import hashlib
import http.server
import io
import itertools
import os
import shutil
import subprocess
import sys
import threading
import uuid
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import rocm_standins as standins
from small_images import CONFIG_TYPE, quiet, tar_of
from stackcheck.build import bootstrap
from stackcheck.matrix import resolve
from stackcheck.oci.documents import OCI_MANIFEST, Descriptor, Manifest, compact_json, sha256
from stackcheck.oci.stores import open_store
from stackcheck.recipe import rocm

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from stackcheck.matrix.stack import Stack

ROOT = Path(__file__).resolve().parents[3]
USER, PASSWORD = "reader", "not-to-be-found-anywhere-Zq7"
GUARDED = ("/pypi", "/pytorch")
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+gzip"
SUITES = {"ubuntu22.04": "jammy", "ubuntu24.04": "noble"}
# Of the host's own index: what really builds a wheel from a source archive.
REAL = ("setuptools", "wheel", "packaging")
PLAIN = {
    "filelock": "3.20.0",
    "einops": "0.8.2",
    "ninja": "1.13.0",
    "typing-extensions": "4.15.0",
    "pluggy": "1.6.0",
}
KEY_NAME = "Stand-in for AMD <stand-in@example.org>"


class Mirror:
    """The tree, and what leads to it."""

    def __init__(self, folder: Path, address: str) -> None:
        self.tree = folder / "tree"
        self.scratch = folder / "scratch"
        self.file = folder / "mirrors.yaml"
        self.key = folder / "rocm.gpg"
        self.netrc = folder / "netrc"
        self.home = folder / "gnupg"
        self.address = address
        self.asked: list[str] = []
        self.scratch.mkdir(parents=True)

    def environment(self, cache: Path) -> dict[str, str]:
        """What a user of the site has set for pip, uv and this tool; logins are the clients' own."""
        host = self.address.partition("://")[2]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
        return {
            **kept,
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://{USER}:{PASSWORD}@{host}/pypi/",
            "PIP_TRUSTED_HOST": host.partition(":")[0],
            "NETRC": str(self.netrc),
            "UV_CACHE_DIR": str(self.scratch / "uv"),
            "PIP_CACHE_DIR": str(self.scratch / "pip"),
            "STACKCHECK_MIRRORS": str(self.file),
            "STACKCHECK_WHEEL_CACHE": str(cache),
        }

    def write_configuration(self, registry: str) -> None:
        apt = "".join(
            f"  {name}: ['deb [trusted=yes] {self.address}/ubuntu {suite} main']\n"
            for name, suite in SUITES.items()
        )
        self.file.write_text(
            "schema: 1\nurls:\n"
            f"  https://download.pytorch.org/whl: {self.address}/pytorch/whl\n"
            f"  https://repo.radeon.com: {self.address}/amd\n"
            f"registries:\n  docker.io: {registry}/hub\napt:\n{apt}"
            f"keys:\n  https://repo.radeon.com: {self.key.name}\n"
        )
        host = self.address.partition("://")[2].partition(":")[0]
        self.netrc.write_text(f"machine {host} login {USER} password {PASSWORD}\n")
        self.netrc.chmod(0o600)


def fill(mirror: Mirror, stacks: Sequence[Stack]) -> None:
    """Everything that the stacks ask for, as a site would have copied it."""
    for name in REAL:
        _download_real(mirror, name)
    for name, version in PLAIN.items():
        _plain(mirror, name, version)
    for stack in stacks:
        for name, version in (pin.split("==") for pin in stack.requirements[1:]):
            _plain(mirror, name, version)
        _torch(mirror, stack)
    _flash_attn(mirror, stacks)
    _sign_with_new_key(mirror)
    for version in sorted({stack.runtime_version or "" for stack in stacks if rocm.takes_smi(stack)}):
        _amd_archive(mirror, version, [stack for stack in stacks if stack.runtime_version == version])
    # gpg started an agent for its home.
    subprocess.run(["gpgconf", "--homedir", str(mirror.home), "--kill", "all"], check=True, timeout=60)
    for system in sorted({stack.os for stack in stacks}):
        _ubuntu_archive(mirror, system, [stack for stack in stacks if stack.os == system])


def _plain(mirror: Mirror, name: str, version: str) -> None:
    """A package of one module; pytest asks for the metadata of pluggy, so its stand-in requires it."""
    module = name.replace("-", "_")
    files = {f"{module}/__init__.py": f"__version__ = {version!r}\n"}
    needs = ("pluggy",) if name == "pytest" else ()
    standins.wheel(mirror.tree / "pypi" / name, name, version, files, needs=needs)


def _download_real(mirror: Mirror, name: str) -> None:
    folder = mirror.tree / "pypi" / name
    folder.mkdir(parents=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "--dest", str(folder), name], check=True, timeout=300)


def _torch(mirror: Mirror, stack: Stack) -> None:
    """torch with what it needs, where its makers put it."""
    assert stack.triton
    assert stack.collective
    python = f"cp{stack.python.replace('.', '')}"
    release = stack.runtime_version or ""
    major, minor, patch = (int(part) for part in release.split("."))
    numbers = [int(part) for part in stack.collective.version.split(".")]
    codes = {
        "hip": major * 10_000_000 + minor * 100_000 + patch,
        "rccl": numbers[0] * 10_000 + numbers[1] * 100 + numbers[2],
    }
    libraries = mirror.scratch / f"libraries-{release}"
    if not libraries.exists():
        for stem in (*standins.ROCM_LIBRARIES, "libtorch_hip", "libtorch_cpu"):
            standins.library(libraries, stem, codes)
        standins.library(libraries, "libamd_smi", codes, suffix=".so.26")
    own = {
        "torch/lib/" + name: (libraries / name).read_bytes()
        for name in ("libtorch_hip.so", "libtorch_cpu.so")
    }
    needs = ["filelock", "typing-extensions>=4.10.0", 'setuptools; python_version >= "3.12"']
    folders, tag = ["lib"], f"{python}-{python}-manylinux_2_28_x86_64"
    of_rocm = {f"{name}.so": (libraries / f"{name}.so").read_bytes() for name in standins.ROCM_LIBRARIES}
    if stack.wheels == "amd":
        place = mirror.tree / "amd" / "rocm" / "manylinux" / f"rocm-rel-{release}"
        version, triton_version = (
            f"{stack.torch}+rocm{release}.lw.git39497456",
            f"{stack.triton.version}+rocm{release}.gita272dfa8",
        )
        folders, tag = ["lib", "/opt/rocm/lib"], f"{python}-{python}-linux_x86_64"
        triton_place = place
    else:
        place = mirror.tree / "pytorch" / "whl" / (stack.wheel_tag or "") / "torch"
        triton_place = place.parent / stack.triton.name
        version, triton_version = stack.requirements[0].partition("==")[2], stack.triton.version
        if stack.layout == "amdrocm":
            needs.append(f"rocm[libraries,device-all]=={release}")
            folders += ["../_rocm_sdk_core/lib", "../_rocm_sdk_libraries/lib"]
            smi = (libraries / "libamd_smi.so.26").read_bytes()
            _rocm_wheels(place.parent, release, {**of_rocm, "libamd_smi.so.26": smi})
        else:
            own |= {f"torch/lib/{name}": body for name, body in of_rocm.items()} | _kernels("torch/")
    needs.append(f"{stack.triton.name}=={triton_version}")
    modules = {
        "torch/__init__.py": standins.TORCH.format(
            version=version, folders=folders, names=(*standins.ROCM_LIBRARIES, "libtorch_cpu", "libtorch_hip")
        ),
        "torch/version.py": standins.TORCH_VERSION.format(hip=f"{release}.53211-stand-in"),
        "torch/_C.py": standins.TORCH_C.format(archs=" ".join(standins.ARCHS)),
        "torch/cuda/__init__.py": standins.TORCH_CUDA,
        "torch/cuda/nccl.py": standins.TORCH_NCCL.format(rccl=tuple(numbers)),
        "torch/distributed/__init__.py": standins.TORCH_DISTRIBUTED,
    }
    standins.wheel(place, "torch", version, {**own, **modules}, needs=needs, tag=tag)
    triton = {
        "triton/__init__.py": standins.TRITON.format(version=stack.triton.version),
        **standins.TRITON_FILES,
    }
    standins.wheel(triton_place, stack.triton.name, triton_version, triton, tag=tag)


def _kernels(below: str) -> dict[str, bytes]:
    pairs = itertools.product(standins.KERNELS, standins.ARCHS)
    return {below + pattern.format(arch=arch): b"stand-in" for pattern, arch in pairs}


def _rocm_wheels(index: Path, release: str, libraries: dict[str, bytes]) -> None:
    """ROCm as Python packages (pytorch/test-infra#8436): `rocm` is a source archive that names the others."""
    core = {
        "libamd_comgr.so",
        "libhsa-runtime64.so",
        "libamdhip64.so",
        "librocm_smi64.so",
        "libamd_smi.so.26",
    }
    smi = {f"_rocm_sdk_core/share/amd_smi/{name}": text for name, text in _amdsmi(release).items()}
    files = {f"_rocm_sdk_core/lib/{name}": body for name, body in libraries.items() if name in core}
    standins.wheel(
        index / "rocm-sdk-core",
        "rocm-sdk-core",
        release,
        {**files, **smi},
        tag="py3-none-manylinux_2_28_x86_64",
    )
    files = {f"_rocm_sdk_libraries/lib/{name}": body for name, body in libraries.items() if name not in core}
    standins.wheel(
        index / "rocm-sdk-libraries",
        "rocm-sdk-libraries",
        release,
        {**files, **_kernels("_rocm_sdk_libraries/")},
        tag="py3-none-manylinux_2_28_x86_64",
    )
    extras = {"libraries": [f"rocm-sdk-libraries=={release}"], "device-all": []}
    setup = (
        f"from setuptools import setup\nsetup(name='rocm', version={release!r}, py_modules=['rocm_sdk'],\n"
        f"      install_requires=['rocm-sdk-core=={release}'], extras_require={extras!r})\n"
    )
    pyproject = "[build-system]\nrequires = ['setuptools']\nbuild-backend = 'setuptools.build_meta'\n"
    standins.source_archive(
        index / "rocm", "rocm", release, {"setup.py": setup, "rocm_sdk.py": "", "pyproject.toml": pyproject}
    )


def _amdsmi(release: str) -> dict[str, str]:
    year = {"6.2.4": {"year": 24, "major": 6, "minor": 3}}.get(
        release, {"major": 26, "minor": 2, "release": 1}
    )
    return {
        "amdsmi/__init__.py": standins.AMDSMI.format(version=year),
        "amdsmi/amdsmi_wrapper.py": standins.AMDSMI_WRAPPER.format(no_driver=standins.NO_DRIVER),
        "amdsmi/amdsmi_exception.py": standins.AMDSMI_EXCEPTION,
    }


def _flash_attn(mirror: Mirror, stacks: Sequence[Stack]) -> None:
    for version in {stack.flash_attn.version for stack in stacks if stack.flash_attn}:
        sets = sorted({stack.archs for stack in stacks})
        standins.flash_attn(mirror.tree / "pypi" / "flash-attn", version, sets, mirror.scratch / "flash")


def _amd_archive(mirror: Mirror, release: str, stacks: Sequence[Stack]) -> None:
    """AMD's archive of one release: amd-smi-lib, and ROCm's packages where a stack takes them."""
    archive = mirror.tree / "amd" / "rocm" / "apt" / release
    root = mirror.scratch / f"smi-{release}"
    made = standins.library(root / "opt" / f"rocm-{release}" / "lib", "libamd_smi", {}, suffix=".so.26.2")
    for link in ("libamd_smi.so", "libamd_smi.so.26"):
        made.with_name(link).symlink_to(made.name)
    module = made.parent.parent / "share" / "amd_smi"
    for name, text in _amdsmi(release).items():
        (module / name).parent.mkdir(parents=True, exist_ok=True)
        (module / name).write_text(text)
    short = "".join(f"{int(part):02d}" for part in release.split(".")).lstrip("0")
    version = f"26.2.1.{short}-93~24.04"
    needs = "sudo, python3 (>= 3.6.8), python3-pip, rocm-core"
    standins.deb(archive / "pool", rocm.SMI, version, root, needs=needs, script="exit 97")
    if any(rocm.takes_runtime(stack) for stack in stacks):
        _rocm_packages(mirror, archive / "pool", release, f"{release}.{short}-93~24.04")
    for suite in SUITES.values():
        _index_archive(archive, suite, origin="repo.radeon.com", home=mirror.home)


def _rocm_packages(mirror: Mirror, pool: Path, release: str, version: str) -> None:
    """One package with all libraries, on which the others depend: AMD's are some fifty."""
    root = mirror.scratch / f"rocm-{release}" / "root"
    place = root / "opt" / f"rocm-{release}"
    for name in standins.ROCM_LIBRARIES:
        target = place / "lib" / f"{name}.so"
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(mirror.scratch / f"libraries-{release}" / f"{name}.so", target)
    for path, body in _kernels("").items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(body)
    script = f"ln -sfn /opt/rocm-{release} /opt/rocm"
    standins.deb(pool, "rocm-core", version, root, script=script)
    for name in rocm.RUNTIME:
        standins.deb(pool, name, version, mirror.scratch / f"rocm-{release}" / name, needs="rocm-core")


def _ubuntu_archive(mirror: Mirror, system: str, stacks: Sequence[Stack]) -> None:
    """The distribution's packages: an interpreter of this host, two libraries, and empty ones."""
    archive, suite = mirror.tree / "ubuntu", SUITES[system]
    pool = archive / "pool" / suite
    libraries = mirror.scratch / suite / "libdrm2" / "usr" / "lib" / "x86_64-linux-gnu"
    for stem, number in (("libdrm", 2), ("libdrm_amdgpu", 1)):
        standins.library(libraries, stem, {}, suffix=f".so.{number}")
    standins.deb(pool, "libdrm2", "2.4.125-1", mirror.scratch / suite / "libdrm2", script="ldconfig")
    pythons = sorted({stack.python for stack in stacks})
    for python in pythons:
        root = mirror.scratch / suite / f"python{python}"
        copy_python(python, root)
        standins.deb(pool, f"python{python}", f"{python}.0-1", root, script="ldconfig")
    wanted = {name for stack in stacks for name in stack.base.packages} | {"g++"}
    wanted |= {f"python{python}-{part}" for python in pythons for part in ("dev", "venv")}
    for name in sorted(wanted - {"libdrm2", "ca-certificates", *(f"python{python}" for python in pythons)}):
        python = name.removesuffix("-venv").removesuffix("-dev")
        needs = python if python in {f"python{one}" for one in pythons} else ""
        standins.deb(pool, name, "1.0-1", mirror.scratch / suite / f"empty-{name}", needs=needs)
    _index_archive(archive, suite, origin="Ubuntu", home=None)


def _index_archive(archive: Path, suite: str, *, origin: str, home: Path | None) -> None:
    """Packages, Release and InRelease of a suite; signed if there is a home of keys."""
    below = archive / "dists" / suite
    binary = below / "main" / "binary-amd64"
    binary.mkdir(parents=True, exist_ok=True)
    pool = archive / "pool" / suite if (archive / "pool" / suite).is_dir() else archive / "pool"
    stanzas = [_stanza(path, archive) for path in sorted(pool.glob("*.deb"))]
    (binary / "Packages").write_text("\n".join(stanzas))
    (binary / "Packages.gz").write_bytes(gzip.compress((binary / "Packages").read_bytes(), mtime=0))
    listed = "".join(
        f" {digest(path)} {path.stat().st_size} {path.relative_to(below)}\n"
        for path in sorted(binary.iterdir())
    )
    release = (
        f"Origin: {origin}\nSuite: {suite}\nCodename: {suite}\nArchitectures: amd64\nComponents: main\n"
        f"Date: Thu, 01 Jan 2026 00:00:00 UTC\nSHA256:\n{listed}"
    )
    (below / "Release").write_text(release)
    if home:
        _gpg(home, "--clearsign", "--output", str(below / "InRelease"), str(below / "Release"))


def digest(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _stanza(path: Path, archive: Path) -> str:
    fields = subprocess.run(["dpkg-deb", "-f", str(path)], check=True, capture_output=True, text=True).stdout
    size = path.stat().st_size
    return f"{fields.rstrip()}\nFilename: {path.relative_to(archive)}\nSize: {size}\nSHA256: {digest(path)}\n"


def _sign_with_new_key(mirror: Mirror) -> None:
    mirror.home.mkdir(mode=0o700)
    _gpg(mirror.home, "--passphrase", "", "--quick-generate-key", KEY_NAME, "rsa2048", "sign", "never")
    _gpg(mirror.home, "--output", str(mirror.key), "--export", KEY_NAME)


def _gpg(home: Path, *arguments: str) -> None:
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--pinentry-mode", "loopback", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def copy_python(version: str, root: Path) -> None:
    """This host's interpreter of a version, as files below /usr: a distribution of another release has it."""
    program = find_python(version)
    prefix = program.parent.parent
    (root / "usr" / "bin").mkdir(parents=True)
    shutil.copy(program, root / "usr" / "bin" / f"python{version}")
    left_out = shutil.ignore_patterns(
        "test",
        "tests",
        "idlelib",
        "tkinter",
        "turtledemo",
        "site-packages",
        "config-*",
        "__pycache__",
        "lib2to3",
    )
    library = prefix / "lib" / f"python{version}"
    shutil.copytree(library, root / "usr" / "lib" / f"python{version}", ignore=left_out, symlinks=True)
    (root / "usr" / "lib" / f"python{version}" / "site-packages").mkdir()
    for shared in sorted((prefix / "lib").glob(f"libpython{version}.so.1.0")):
        target = root / "usr" / "lib" / "x86_64-linux-gnu"
        target.mkdir(parents=True)
        shutil.copy(shared, target)


def find_python(version: str) -> Path:
    """A whole Python of a version: of this host, else installed by uv. A missing one is a failure."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    if found:
        return found[-1]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "python", "install", version], check=True, timeout=600)
    command = [uv, "python", "find", "--managed-python", version]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    return Path(told.strip()).resolve()


def push_bases(stacks: Sequence[Stack], registry: str) -> None:
    """Each base and builder in the registry: Debian's files under the names and releases of the stacks'."""
    (cpu,) = resolve.load_stacks(ROOT, ("cpu-*",))
    assert cpu.base.suite
    made = bootstrap.bootstrap(cpu.base.suite, cpu.base.packages, ROOT / "build" / "bases", report=quiet)
    with made.path.open("rb") as tar:
        layer = gzip.compress(tar.read(), compresslevel=1, mtime=0)
    # The engine's cache knows a step by its base, not by what apt found: with a base of this run no step of
    # an earlier mirror is taken.
    run = uuid.uuid4().hex
    for system in sorted({stack.os for stack in stacks}):
        number = system.removeprefix("ubuntu")
        release = f"BUILD_ID={run}\nID=ubuntu\nVERSION_ID={number}\nVERSION_CODENAME={SUITES[system]}\n"
        over = gzip.compress(tar_of("usr/lib/os-release", release.encode()), mtime=0)
        of_system = [stack for stack in stacks if stack.os == system]
        names = {one.reference or "" for stack in of_system for one in (stack.base, stack.builder) if one}
        for name in sorted(names):
            short = name if "/" in name else f"library/{name}"
            _push(f"{registry}/hub/{short}", [layer, over])


def _push(name: str, layers: Sequence[bytes]) -> None:
    target, _, tag = name.rpartition(":")
    config = compact_json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
            "rootfs": {"type": "layers", "diff_ids": [sha256(gzip.decompress(layer)) for layer in layers]},
            "history": [{"created_by": "a stand-in"}] * len(layers),
        }
    )
    store = open_store(target)
    with store.writing(quiet):
        blobs = [_blob(store, CONFIG_TYPE, config), *(_blob(store, LAYER_TYPE, layer) for layer in layers)]
        document = {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "config": blobs[0], "layers": blobs[1:]}
        store.write_manifest(Manifest(media_type=OCI_MANIFEST, body=compact_json(document)), tag)


def _blob(store: Any, media_type: str, body: bytes) -> dict[str, Any]:
    blob = Descriptor(media_type=media_type, digest=sha256(body), size=len(body))
    store.write_blob(blob, lambda: (body,))
    return blob.as_json()


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files, folders as pages of links with hashes, and a login for the indexes."""

    def __init__(self, *arguments: Any, mirror: Mirror, **options: Any) -> None:
        self.mirror = mirror
        super().__init__(*arguments, directory=str(mirror.tree), **options)

    def log_message(self, *_arguments: object) -> None:
        """Keep quiet."""

    def send_head(self) -> Any:
        self.mirror.asked.append(self.path)
        login = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        if self.path.startswith(GUARDED) and self.headers.get("Authorization") != login:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="mirror"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return None
        return super().send_head()

    def list_directory(self, path: Any) -> Any:
        links = "".join(
            _link(Path(path) / name) for name in sorted(entry.name for entry in Path(path).iterdir())
        )
        body = f"<!DOCTYPE html><html><body>{links}</body></html>".encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        return io.BytesIO(body)


def _link(path: Path) -> str:
    name = unquote(path.name).replace("+", "%2B")
    if path.is_dir():
        return f'<a href="{name}/">{path.name}</a>\n'
    return f'<a href="{name}#sha256={digest(path)}">{path.name}</a>\n'


@contextlib.contextmanager
def served(folder: Path, host: str) -> Iterator[Mirror]:
    """An empty mirror at an address of this machine that containers reach."""
    server = http.server.ThreadingHTTPServer((host, 0), http.server.BaseHTTPRequestHandler)
    mirror = Mirror(folder, f"http://{host}:{server.server_address[1]}")
    server.RequestHandlerClass = partial(_Handler, mirror=mirror)  # type: ignore[assignment]
    mirror.tree.mkdir()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join(timeout=60)
