"""Archives of distribution packages, made here: AMD's of each ROCm release, signed, and Ubuntu's.

In: a mirror, the stacks that take packages from it. Out: pools, indexes and keys below the mirror's tree.
"""

import gzip
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import rocm_standins as standins
import rocm_wheels
from rocm_mirror import Mirror
from stackcheck.matrix.stack import Stack
from stackcheck.recipe import rocm

# In place of running pip to install pip, which is half of the time of a build of twenty environments: a copy
# of what pip would install, with its byte code.
COPY_PIP = """import shutil, sys, sysconfig
from pathlib import Path

shutil.copytree(Path(__file__).parent / "installed", sysconfig.get_path("purelib"), dirs_exist_ok=True)
for name in ("pip", "pip3"):
    script = Path(sysconfig.get_path("scripts")) / name
    lines = ["import sys", "from pip._internal.cli.main import main", "sys.exit(main())"]
    script.write_text("".join(f"{line}\\n" for line in [f"#!{sys.executable}", *lines]))
    script.chmod(0o755)
"""
SUITES = {"ubuntu22.04": "jammy", "ubuntu24.04": "noble"}
KEY_NAME = "Stand-in for AMD <stand-in@example.org>"


def amd_archive(mirror: Mirror, release: str, stacks: Sequence[Stack]) -> None:
    """AMD's archive of one release: amd-smi-lib, and ROCm's packages where a stack takes them."""
    archive = mirror.tree / "amd" / "rocm" / "apt" / release.removesuffix(".0")  # as AMD names it
    root = mirror.scratch / f"smi-{release}"
    made = standins.library(root / "opt" / f"rocm-{release}" / "lib", "libamd_smi", {}, suffix=".so.26.2")
    for link in ("libamd_smi.so", "libamd_smi.so.26"):
        made.with_name(link).symlink_to(made.name)
    module = made.parent.parent / "share" / "amd_smi"
    for name, text in rocm_wheels.amdsmi(release).items():
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
    for path, body in rocm_wheels.kernels("").items():
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(body)
    script = f"ln -sfn /opt/rocm-{release} /opt/rocm"
    standins.deb(pool, "rocm-core", version, root, script=script)
    for name in rocm.RUNTIME:
        standins.deb(pool, name, version, mirror.scratch / f"rocm-{release}" / name, needs="rocm-core")


def ubuntu_archive(mirror: Mirror, system: str, stacks: Sequence[Stack]) -> None:
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


def make_key(mirror: Mirror) -> None:
    mirror.home.mkdir(mode=0o700)
    _gpg(mirror.home, "--passphrase", "", "--quick-generate-key", KEY_NAME, "rsa2048", "sign", "never")
    _gpg(mirror.home, "--output", str(mirror.key), "--export", KEY_NAME)


def _gpg(home: Path, *arguments: str) -> None:
    command = ["gpg", "--homedir", str(home), "--batch", "--yes", "--pinentry-mode", "loopback", *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


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
    copied = root / "usr" / "lib" / f"python{version}"
    (copied / "site-packages").mkdir()
    _unpack_pip(copied / "ensurepip")
    for shared in sorted((prefix / "lib").glob(f"libpython{version}.so.1.0")):
        target = root / "usr" / "lib" / "x86_64-linux-gnu"
        target.mkdir(parents=True)
        shutil.copy(shared, target)
    _make_small_and_fast(program, root)


def _unpack_pip(ensurepip: Path) -> None:
    """The bundled pip as files, in place of a wheel that each environment would unpack."""
    (wheel,) = (ensurepip / "_bundled").glob("pip-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(ensurepip / "installed")
    shutil.rmtree(ensurepip / "_bundled")
    (ensurepip / "__main__.py").write_text(COPY_PIP)


def _make_small_and_fast(program: Path, root: Path) -> None:
    """As a distribution ships it: without what a debugger reads, and with byte code.

    A build of ten stacks starts this interpreter some six hundred times, a hundred of them with pip.
    """
    binaries = [*(root / "usr" / "bin").iterdir(), *root.rglob("*.so"), *root.rglob("*.so.*")]
    subprocess.run(["strip", "--strip-unneeded", *map(str, binaries)], check=True, timeout=300)
    command = [str(program), "-m", "compileall", "-qq", "--invalidation-mode", "unchecked-hash"]
    command += ["-s", str(root), "-p", "/", str(root / "usr" / "lib" / program.name)]
    subprocess.run(command, check=True, timeout=300)


def find_python(version: str) -> Path:
    """A whole Python of a version: of this host, else installed by uv. A missing one is a failure."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python{version}"))
    if found:
        return found[-1]
    uv = Path(sys.executable).with_name("uv")
    subprocess.run([uv, "python", "install", version], check=True, timeout=3000)
    command = [uv, "python", "find", "--managed-python", version]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    return Path(told.strip()).resolve()
