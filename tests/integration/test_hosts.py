"""The table of docs/results/hosts.md: what a dry run of `images` says on each distribution.

A host is made of this one: in a mount namespace of its own it has the release file, package sources, keyrings
and package index of another distribution. The program, and the programs that it calls, are this host's.
`STACKCHECK_HOSTS_TABLE=write pytest tests/integration/test_hosts.py` writes the table anew.
"""

import dataclasses
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import apt_layouts
from host_locks import one_at_a_time
from waits import run_program

pytestmark = [pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/results/hosts.md"
BEGINS, ENDS = "<!-- table of made hosts -->", "<!-- end of the table -->"
KEYRING = "usr/share/keyrings/debian-archive-keyring.gpg"
MEMBER = 65533  # nobody's id, and the group of the engine's socket
NAMES = {
    "debian12": "Debian GNU/Linux 12 (bookworm)",
    "debian13": "Debian GNU/Linux 13 (trixie)",
    "testing": "Debian GNU/Linux forky/sid",
    "ubuntu22.04": "Ubuntu 22.04.5 LTS",
    "ubuntu24.04": "Ubuntu 24.04.3 LTS",
    "ubuntu26.04": "Ubuntu 26.04 LTS",
}
# What `apt-cache show debian-archive-keyring` says of the release's own package: packages.ubuntu.com.
CANDIDATES = {
    "ubuntu22.04": "2021.1.1ubuntu2",
    "ubuntu24.04": "2023.4ubuntu1",
    "ubuntu26.04": "2025.1ubuntu1",
}
WAY = """
import json, sys
from stackcheck.imaging import base_sources
from stackcheck.errors import StackcheckError
from stackcheck import mirrors
try:
    found = base_sources.ways("bookworm", "debian12", mirrors.load_mirrors().apt.get("debian12", ()))
    print(json.dumps([found[0].name, found[0].needs]))
except StackcheckError as error:
    print(json.dumps([None, error.next_step]))
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Made:
    """One made host: a release, who asks, and whether the site has a mirror of Debian."""

    release: str
    user: str
    mirror: bool

    @property
    def candidate(self) -> str:
        """The keyring package that its apt would install."""
        return CANDIDATES.get(self.release, "")

    def write(self, folder: Path) -> dict[str, str]:
        """Its files -> where each is laid over this host's own."""
        layout = next(
            one
            for one in map(apt_layouts.draw, itertools.count())
            if one.release == self.release and not one.settings
        )
        layout.write(folder / "apt")
        distribution = layout.distribution
        name = f'PRETTY_NAME="{NAMES[self.release]}"\nID={distribution}\n'
        (folder / "os-release").write_text(f"{name}VERSION_CODENAME={layout.codename}\n")
        keys = folder / "keyrings"
        keys.mkdir()
        if distribution == "debian":
            shutil.copy(Path("/") / KEYRING, keys)
        shown = f"Package: debian-archive-keyring\nVersion: {self.candidate}\n" if self.candidate else ""
        (folder / "apt-cache").write_text(f"#!/bin/sh\nprintf '{shown}'\n".replace("\n'", "\\n'"))
        (folder / "apt-cache").chmod(0o755)
        (folder / "subuid").write_text(f"{MEMBER}:100000:65536\n")
        for program in ("mmdebstrap", "newuidmap"):  # a dry run only looks whether they are there
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / program).write_text("#!/bin/sh\nexit 1\n")
            (folder / "bin" / program).chmod(0o755)
        lines = [
            f"deb [trusted=yes] https://mirror.example.org/{place} main"
            for place in ("debian bookworm", "debian-security bookworm-security")
        ]
        document = {"schema": 1, "apt": {"debian12": lines}} if self.mirror else {"schema": 1}
        (folder / "mirrors.yaml").write_text(json.dumps(document))
        return {
            "os-release": os.path.realpath("/etc/os-release"),
            "apt": "/etc/apt",
            "keyrings": "/usr/share/keyrings",
            "subuid": "/etc/subuid",
            "apt-cache": shutil.which("apt-cache") or "/usr/bin/apt-cache",
        }


HOSTS = [
    Made(release=release, user=user, mirror=mirror)
    for release, user, mirror in itertools.product(NAMES, ("root", "member"), (False, True))
]


def ask(host: Made, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a made host."""
    places = host.write(folder)
    mounts = [f"mount --bind '{folder / name}' '{place}'" for name, place in places.items()]
    # Another user may read this checkout, wherever it is, and may not do what root may.
    become = (
        f"exec setpriv --reuid={MEMBER} --regid={MEMBER} --clear-groups --inh-caps=-all,+dac_read_search "
        "--ambient-caps=-all,+dac_read_search --bounding-set=-all,+dac_read_search --"
    )
    script = "\n".join(["set -e", *mounts, f'{"exec" if host.user == "root" else become} "$@"'])
    environment = {
        **os.environ,
        "STACKCHECK_MIRRORS": str(folder / "mirrors.yaml"),
        "HOME": str(folder),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
    }
    Path("/etc/subuid").touch()
    # A file that is replaced, as `useradd` does with /etc/subuid, loses what is laid over it.
    with one_at_a_time("users"):
        return run_program(
            ["unshare", "--mount", "sh", "-c", script, "made-host", *command],
            cwd=folder,
            env=environment,
            timeout=2000,
        )


def described(host: Made, folder: Path, root: Path) -> tuple[str, str]:
    """Where the base would come from, and what the dry run ends with."""
    way = ask(host, folder / "way", sys.executable, "-c", WAY)
    assert way.returncode == 0, way.stderr
    name, further = json.loads(way.stdout.splitlines()[-1])
    dry = [sys.executable, "-m", "stackcheck", "images", "cpu-*", "--dry-run", "--root", str(root)]
    done = ask(host, folder / "dry", *dry)
    if name:
        installs = f", after installing {further}" if further else ""
        assert done.returncode == 0, done.stdout + done.stderr
        assert "build, then test, certify, publish" in done.stdout
        return f"{name}{installs}", "build"
    assert done.returncode == 2, done.stdout + done.stderr
    step = further.splitlines()[0].partition("; or")[0]
    assert step in done.stdout
    return "none", f"refused; next: {step}, or name a mirror"


@pytest.fixture
def readable() -> Iterator[Path]:
    """A folder that every user may read, as pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="stackcheck-hosts-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


def test_the_table_says_what_images_says_on_every_host(readable):
    checkout = readable / "checkout"  # without what was built in this one
    shutil.copytree(ROOT / "images", checkout / "images")
    for name in ("tests", "trainers"):
        (checkout / name).symlink_to(ROOT / name)
    shutil.copy(ROOT / "matrix.yaml", checkout)
    rows = []
    for number, host in enumerate(HOSTS):
        folder = readable / str(number)
        for name in ("way", "dry"):
            (folder / name).mkdir(parents=True)
        way, result = described(host, folder, checkout)
        user = {"root": "root", "member": "member of docker"}[host.user]
        rows.append((NAMES[host.release], user, "yes" if host.mirror else "no", way, result))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    head = "| host | user | mirror of Debian | base from | `images --dry-run` |\n|---|---|---|---|---|"
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(f"{BEGINS}\n")
    shown, _, after = rest.partition(f"\n{ENDS}")
    if os.environ.get("STACKCHECK_HOSTS_TABLE") == "write":
        PAGE.write_text(f"{before}{BEGINS}\n{head}\n{table}\n{ENDS}{after}", encoding="utf-8")
        return
    assert shown == f"{head}\n{table}"
