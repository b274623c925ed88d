"""What each verb prints: its help, one success and its most likely errors, held to the files in golden/.

`STACKCHECK_WRITE_GOLDEN=1 pytest tests/unit/cli/test_golden.py` writes the files anew: review the diff. The
flow is real; only the engine and the host are fake. What changes from run to run is <a placeholder>.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import small_fleet
import speed_results
from small_checkout import AMD_STACK, CPU_STACK, FOREIGN, Done, FakeEngine, answer, call
from small_images import new_key
from stackcheck import cli
from stackcheck.certificate import keys
from stackcheck.cli import build
from stackcheck.engine import doctor, first_host
from stackcheck.engine.doctor import HostFinding
from stackcheck.fleet.slurm import Slurm
from stackcheck.imaging import base_sources, bootstrap, host_base
from stackcheck.imaging.dpkg import Database
from stackcheck.imaging.wheels import installed
from stackcheck.matrix.stack import Stack
from stackcheck.oci.layout import OciLayout
from stackcheck.proof import prove

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

GOLDEN = Path(__file__).parent / "golden"
WRITE = "STACKCHECK_WRITE_GOLDEN"
REFERENCE = f"oci:dist:{CPU_STACK}"
BY_DIGEST = "oci:dist@<digest>"  # of that image
CPU = ("--device-model", "CPU", "--driver", "none")
RESULT = f"build/{CPU_STACK}/run/result.json"
GEMM = "test_kernels.py::test_gemm"
CHECK = "test_devices.py::test_device_count"
# The two differ in torch, and in what goes with it.
BISECT = (
    *("--good", "rocm7.2.1-torch2.12.1-fa2.8.3-py3.12-ubuntu24.04"),
    *("--bad", "rocm7.2.1-torch2.13.0-fa2.8.3-py3.12-ubuntu24.04"),
    *("--check", GEMM),
)
Capsys = pytest.CaptureFixture[str]
FLEET_JOB = "feedbeef"
ACCEPTED = ("--accept-python", "0" * 64)
REAL_SLURM = Slurm  # cases replace it
IN_A_REGISTRY = ("--repository", "registry.example.org/team/stacks", "--claim", "checkout")
REAL_CONNECTED = build.connected  # the fixture `engine` replaces it


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What a case may change before its command runs."""

    root: Path
    engine: FakeEngine
    patch: pytest.MonkeyPatch
    capsys: Capsys

    def run(self, *arguments: str | Path) -> Done:
        return call(self.capsys, *map(self._with_digest, arguments))

    def _with_digest(self, argument: str | Path) -> str | Path:
        if argument != BY_DIGEST:
            return argument
        return f"oci:dist@{OciLayout(self.root / 'dist').read_manifest(CPU_STACK).digest}"

    def edit(self, old: str, new: str, name: str = "matrix.yaml") -> None:
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))


@dataclasses.dataclass(frozen=True)
class Case:
    """One command line after the verb; `before` runs first, in the checkout that earlier cases left."""

    arguments: tuple[str, ...] = ()
    before: Callable[[World], object] | None = None


def published(world: World) -> None:
    assert world.run("images").code == 0


def built(world: World) -> None:
    assert world.run("build", CPU_STACK).code == 0


def certified(world: World) -> None:
    assert world.run("certify", CPU_STACK, "--force").code == 0


def failing(world: World) -> None:
    world.engine.answer = answer((GEMM, "failed"))


def unfit(world: World) -> None:
    world.engine.answer = answer((GEMM, "invalid"))


def nodes_leave(world: World, failing: str) -> None:
    """Nodes without a cluster: they leave the files that nodes leave."""
    world.patch.setattr("stackcheck.cli.fleet.secrets.token_hex", lambda _bytes: FLEET_JOB)
    world.patch.setattr("stackcheck.fleet.slurm.Slurm", small_fleet.LeavingEngine)
    world.patch.setattr(small_fleet.LeavingEngine, "failing", failing)


def a_site_with_slurm(world: World) -> None:
    world.patch.setattr("stackcheck.fleet.slurm.Slurm", REAL_SLURM)


def other_user(world: World) -> None:
    world.patch.setattr("stackcheck.suite.container_user.uid", lambda: 60706)


def ran(world: World) -> None:
    world.engine.answer = answer()
    assert world.run("test", CPU_STACK).code == 0


def bare(world: World) -> None:
    """A run by pytest alone, which knows no image and no stack."""
    ran(world)
    path = world.root / RESULT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image": None, "stack_id": None}))


def failing_run(world: World) -> None:
    failing(world)
    assert world.run("test", CPU_STACK).code == 6


def of_a_lower_tier(world: World) -> None:
    """A smoke run, which certified a processor until the policy asked for more."""
    ran(world)
    world.edit("cpu: smoke", "cpu: standard")


def policy_asks_for_more(world: World) -> None:
    world.engine.answer = answer()
    certified(world)
    world.edit("cpu: smoke", "cpu: standard")


def no_result(world: World) -> None:
    world.engine.answer = lambda _told: None


def on_debian_12(world: World) -> None:
    told = {"ID": "debian", "VERSION_CODENAME": "bookworm", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}
    world.patch.setattr("stackcheck.engine.apt.host_release", lambda: told)


def without_python(world: World) -> None:
    """A host that has nothing but dpkg."""
    folder = world.root / "dpkg"
    folder.mkdir()
    stanza = "Package: dpkg\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n"
    (folder / "status").write_text(stanza)
    world.patch.setattr(host_base, "Database", lambda _admin: Database(folder))


def small_environment(world: World) -> None:
    """An environment with one package; the interpreter itself is not asked."""
    site, scripts = world.root / "env" / "site", world.root / "env" / "bin"
    info = site / "thing-1.2.dist-info"
    info.mkdir(parents=True)
    wheel = b"Wheel-Version: 1.0\nTag: py3-none-any\n"
    (info / "WHEEL").write_bytes(wheel)
    (site / "thing.py").write_bytes(b"")
    lines = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in (("thing.py", b""), ("thing-1.2.dist-info/WHEEL", wheel))
    ]
    (info / "RECORD").write_text("".join(lines))
    found = installed.Environment(
        python="3.12.3",
        prefix=world.root / "env",
        paths={"scripts": scripts, "purelib": site, "platlib": site},
        infos={"thing": info},
    )
    world.patch.setattr(installed, "environment", lambda _interpreter: found)


def changed_environment(world: World) -> None:
    (world.root / "env" / "site" / "thing.py").write_bytes(b"changed")


def another_key(world: World) -> None:
    (world.root / "other.pub").write_bytes(keys.public_pem(new_key().public_key()))


def fresh(world: World) -> None:
    """The images of another day, published anew, and no night yet."""
    world.engine.answer = answer()
    for name in ("dist", "build"):
        shutil.rmtree(world.root / name, ignore_errors=True)
    published(world)


def revoking(world: World) -> None:
    """One node may take a certificate back."""
    path = world.root / "matrix.yaml"
    path.write_text(path.read_text().replace("\npolicy:\n", "\npolicy:\n  revoke: auto\n", 1))


def broken_matrix(world: World) -> None:
    world.edit("publish: oci:dist", "publish: [oci:dist]")


def no_engine(world: World) -> None:
    world.patch.setenv("DOCKER_HOST", f"unix://{world.root}/none.sock")
    world.patch.setattr(build, "connected", REAL_CONNECTED)


def file_in_place_of(name: str) -> Callable[[World], None]:
    def put(world: World) -> None:
        path = world.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("in the way")

    return put


def found_on_the_host(*, engine: bool) -> Callable[[World], None]:
    rows = (
        HostFinding(
            name="engine", ok=engine, needed=True, found="29.1" if engine else "no daemon", fix="FIX"
        ),
        HostFinding(name="amd GPUs", ok=False, needed=False, found="no device"),
    )

    def prepare(world: World) -> None:
        world.patch.setattr(doctor, "examine", lambda *_arguments, **_options: rows)
        way = base_sources.Way(name="this host's archive of debian")
        world.patch.setattr(bootstrap, "ready", lambda *_arguments: (way,))

    return prepare


def steps_that_end_well(world: World) -> None:
    """Each step of the first hour is a process of its own."""
    world.patch.setattr(first_host, "_run", lambda *_arguments: (0, ""))


def newest(**versions: str) -> Callable[[World], None]:
    """The package indexes, which no unit test asks."""

    def put(world: World) -> None:
        world.patch.setattr(
            "stackcheck.recipe.indexes.versions",
            lambda name, **_options: (versions[name],) if name in versions else (),
        )

    return put


def locked(*missing: str) -> Callable[[World], None]:
    outcome = SimpleNamespace(missing=missing, kept=())
    return lambda world: world.patch.setattr("stackcheck.recipe.lock.lock", lambda *_arguments: outcome)


def lock_that_cannot_be_written(world: World) -> None:
    from stackcheck.files.atomic import write_atomically

    def write(stack: Stack, images: Path, _upstream: object) -> None:
        write_atomically(images / stack.id / "requirements.lock" / "x", (b"",))

    world.patch.setattr("stackcheck.recipe.lock.lock", write)


def measured(world: World) -> None:
    speed_results.write_three(world.root)


def proven(state: str) -> Callable[[World], None]:
    """The runs of the faults, which take minutes, have ended like this."""
    fault = {"test": "t", "name": "a GPU is missing", "check": CHECK, "vendor": "amd", "reason": "it passed"}
    line = {
        "checks": [CHECK],
        "faults": [fault | {"expected": "failed", "state": state}],
        "healthy": [fault | {"name": "nothing", "state": "passed"}],
        "failed": [],
    }
    told = prove.FaultRun.model_validate_json(json.dumps(line))

    def put(world: World) -> None:
        world.patch.setattr(prove, "beside", lambda *_a, **_k: contextlib.nullcontext(lambda: told))
        world.patch.setattr(prove, "here", lambda *_a, **_k: told)

    return put


def garbage(world: World) -> None:
    body = b"a layer of nothing"
    (world.root / "dist" / "blobs" / "sha256" / hashlib.sha256(body).hexdigest()).write_bytes(body)


# verb -> its cases. Where a verb cannot have five likely errors, the comment says why.
CASES: dict[str, tuple[Case, ...]] = {
    # It takes no argument, and what it finds is a table, not an error: only a lacking host and a matrix fail.
    "doctor": (
        Case((), found_on_the_host(engine=True)),
        Case((), found_on_the_host(engine=False)),
        Case(("--root", "nowhere"), found_on_the_host(engine=True)),
        Case(("--repair",)),
        Case((), broken_matrix),
    ),
    # Its steps are commands of their own, which have their errors: only the name and the matrix can be wrong.
    "first-host": (
        Case((AMD_STACK,), steps_that_end_well),
        Case(("nope",)),
        Case(("cuda13*",)),
        Case(()),
        Case((AMD_STACK, "--root", "nowhere")),
        Case((AMD_STACK,), broken_matrix),
    ),
    # It only reads the matrix and compares ids.
    "list": (
        Case(("cpu-*", AMD_STACK, "cuda12.1-*")),
        Case(("cpu-*",), of_a_lower_tier),
        Case(("nope",)),
        Case(("--root", "nowhere")),
        Case((), broken_matrix),
    ),
    "explain": (
        Case(("rocm=7.2.1", "torch=2.13.0", "arch=gfx950")),
        Case(("rocm=7.2", "torch=2.6.0")),
        Case(("rocm=7.2.1", "torch=2.13.0", "arch=gfx942")),
        Case(("nope",)),
        Case(("colour=red",)),
        Case(("rocm=seven",)),
        Case(()),
        Case(("rocm=7.2", "--root", "nowhere")),
    ),
    # An index that does not answer is shown as a row; selectors and the matrix are what can be wrong.
    "outdated": (
        Case(("cpu-*",), newest(numpy="2.9.9", torch="2.15.0+cpu")),
        Case(("nope",)),
        Case(("--root", "nowhere")),
        Case((), broken_matrix),
    ),
    # It reads one file and has one action.
    "compat": (
        Case(("check",)),
        Case(("fix",)),
        Case(("check", "--root", "nowhere")),
        Case(
            (),
            lambda world: world.edit(
                "rules:\n",
                "rules:\n  - id: R5-planted\n    when: {arch: gfx950}\n    require: {rocm: '<7.0'}\n"
                "    because: planted\n    source: CM\n",
                "images/compat.yaml",
            ),
        ),
        Case((), lambda world: (world.root / "images" / "compat.yaml").write_text("rules: [")),
    ),
    "lock": (
        Case(("cpu-*",), locked()),
        Case(("cpu-*",), locked("no index offers torch==2.13.0+cpu")),
        Case(("nope",)),
        Case(("--root", "nowhere")),
        Case(("cpu-*",), lock_that_cannot_be_written),
        Case(("cpu-*",), broken_matrix),
    ),
    "base": (
        Case(("--from-host", "--dry-run", "cpu-*"), on_debian_12),
        Case(("cpu-*",)),
        Case(("--from-host", "rocm7.2.0-torch2.11*")),
        Case(("--from-host", "nope")),
        Case(("--from-host", "cpu-*"), without_python),
    ),
    "wheelhouse": (
        Case(("house", "--from-environment", "python"), small_environment),
        Case(("house", "cpu-*", "--from-environment", "python")),
        Case(("house", "--from-environment", "python"), changed_environment),
        Case(("house",)),
        Case(("house", "nope", "--from-environment", "python")),
    ),
    "mirror": (
        Case(("--print", "rocm7.2.4-torch2.9.1-*")),
        Case(("--print", "--json", "rocm7.14*")),
        Case(),
        Case(("--print", "nope")),
        Case(("--print", "--mirrors", "nowhere.yaml")),
    ),
    "render": (
        Case(("--check", "cpu-*")),
        Case(("cpu-*",)),
        Case(
            ("--check", "cpu-*"),
            lambda world: (world.root / "images" / CPU_STACK / "Dockerfile").write_text("FROM scratch\n"),
        ),
        Case(("nope",)),
        Case(("--root", "nowhere")),
        Case(("cpu-*",), file_in_place_of(f"images/{CPU_STACK}")),
        Case(("cpu-*",), broken_matrix),
    ),
    "build": (
        Case(("cpu-*",)),
        Case(("nope",)),
        Case(("rocm7.14.1-*",)),
        Case(("cpu-*", "--wheelhouse", "nowhere")),
        Case(("cpu-*",), no_engine),
        Case(("cpu-*",), file_in_place_of("build")),
    ),
    "test": (
        Case((CPU_STACK,)),
        Case(("nope",)),
        Case(("rocm6.4*",)),
        Case((CPU_STACK,), failing),
        Case((CPU_STACK,), unfit),
        Case((CPU_STACK,), no_result),
        Case((FOREIGN, "--accept-python", "abc")),
        Case((FOREIGN, *ACCEPTED), ran),
    ),
    "judge": (
        Case((RESULT, "--stack", CPU_STACK), ran),
        Case((RESULT,), bare),
        Case((RESULT, "--stack", CPU_STACK), failing_run),
        Case((RESULT,), lambda world: (unfit(world), world.run("test", CPU_STACK))),
        Case((RESULT, "--json"), ran),
        Case(("nowhere.json",)),
        Case((RESULT,), lambda world: (world.root / RESULT).write_text("{")),
        Case((RESULT, "--stack", "nope"), ran),
        Case((RESULT, "--stack", AMD_STACK)),
    ),
    "history": (
        Case((), ran),
        Case(("import", RESULT)),
        Case(("export", "--to", "runs.csv", "--table", "runs")),
        Case(("rebuild",)),
        Case(("watch",)),
        Case(("--stack", "nope")),
        Case(("--metric", "nope*")),
        Case(("--since", "last week")),
        Case(("export", "--to", "runs.xlsx")),
        Case(("import", "nowhere.json")),
        Case(("import", RESULT), lambda world: (world.root / RESULT).write_text("{")),
        Case((), file_in_place_of("build/history")),
    ),
    "gate": (
        Case(("--state", "state")),
        Case(
            (
                "registry.example.org/a@sha256:b",
                "--gpu-vendor",
                "amd",
                "--install",
                "kubernetes",
                "--dry-run",
            ),
            other_user,
        ),
        Case(("--state", "state", "--gpu-vendor", "cpu", "--python", "/nowhere/python")),
        Case(("--install", "kubernetes")),
    ),
    "fleet": (
        Case(("run", "--help")),
        Case(("run", CPU_STACK, "--nodes", "3"), (lambda world: (built(world), nodes_leave(world, "")))),
        Case(("run", CPU_STACK, "--nodes", "3"), lambda world: nodes_leave(world, GEMM)),
        Case(("collect", FLEET_JOB)),
        Case(("run", CPU_STACK, "--nodes", "2", "--dry-run", "--python", "python3"), a_site_with_slurm),
        Case(
            ("run", CPU_STACK, "--nodes", "2", "--engine", "kubernetes", "--dry-run", *IN_A_REGISTRY),
            other_user,
        ),
        Case(("run", CPU_STACK, "--nodes", "2", "--engine", "kubernetes", "--dry-run")),
        Case(("run", CPU_STACK, "--nodes", "2", "--engine", "kubernetes", "--results", "memory://r")),
        Case(
            (
                "run",
                CPU_STACK,
                "--nodes",
                "2",
                "--array",
                "--exclude",
                "bad1",
                "--python",
                "python3",
                "--dry-run",
            )
        ),
        Case(("run", CPU_STACK, "--nodes", "2", "--array", "--node", "good1", "--dry-run")),
        Case(("run", CPU_STACK, "--nodes", "2", "--results", "results")),
        Case(("run", "nope", "--nodes", "2")),
        Case(("run", CPU_STACK, "--nodes", "2", *ACCEPTED)),
        Case(("run", CPU_STACK, "--nodes", "0")),
        Case(("run", AMD_STACK, "--nodes", "2")),
        Case(("run", CPU_STACK, "--nodes", "2"), lambda world: world.patch.setenv("PATH", "/nonexistent")),
        Case(("collect", "nowhere")),
    ),
    "compare": (
        Case((CPU_STACK, RESULT), ran),
        Case(("--paired", CPU_STACK, CPU_STACK, "--dry-run")),
        Case((CPU_STACK, "nope")),
        Case((CPU_STACK, RESULT), lambda world: (world.root / RESULT).write_text("{")),
        Case(("--paired", CPU_STACK, CPU_STACK, "--rounds", "1")),
        Case(("--paired", CPU_STACK, CPU_STACK), ran),
        Case((CPU_STACK, FOREIGN, *ACCEPTED)),
    ),
    "bisect": (
        Case((*BISECT, "--dry-run")),
        Case(("--good", CPU_STACK, "--bad", "nope", "--check", GEMM)),
        Case(("--good", CPU_STACK, "--bad", CPU_STACK, "--check", GEMM)),
        Case(("--good", CPU_STACK, "--bad", AMD_STACK, "--check", GEMM)),
        Case(BISECT, no_engine),
    ),
    "certify": (
        Case((CPU_STACK,)),
        Case(("nope",)),
        Case((CPU_STACK, "--force"), failing),
        Case((CPU_STACK, "--force"), unfit),
        Case((FOREIGN,), lambda world: world.engine.labels.update({"stackcheck.stack": "cpu-other"})),
        Case((CPU_STACK, "--dry-run")),
        Case((CPU_STACK, "--against", "oci:dist:nope")),
        Case((CPU_STACK,), no_engine),
    ),
    "publish": (
        Case((CPU_STACK,), certified),
        Case(("nope",)),
        Case((CPU_STACK, "--to", "oci:dist:tag")),
        Case((CPU_STACK,), lambda world: (failing(world), world.run("certify", CPU_STACK, "--force"))),
        Case((CPU_STACK,), lambda world: shutil.rmtree(world.root / "build" / CPU_STACK / "statements")),
        Case((CPU_STACK,), policy_asks_for_more),
        Case((CPU_STACK,), lambda world: shutil.rmtree(world.root / "build")),
    ),
    "images": (
        Case(()),
        Case(("nope",)),
        Case((AMD_STACK,)),
        Case(("rocm7.14.1-*",)),
        Case(("--force",), failing),
        Case(("--force",), unfit),
    ),
    "export": (
        Case((CPU_STACK, "--output", "image.tar"), built),
        Case(("nope",)),
        Case((FOREIGN,)),
        Case((CPU_STACK, "--output", "image.tar/below")),
        Case(
            (CPU_STACK,),
            lambda world: (world.root / "build" / CPU_STACK / "oci" / "index.json").write_text("{"),
        ),
        Case((CPU_STACK,), lambda world: shutil.rmtree(world.root / "build")),
    ),
    "find": (
        Case(("--gpu", "CPU"), published),
        Case(("--gpu", "CPU", "--torch", ">=99", "--all")),
        Case(("--gpu", "MI300X", "--driver", "6.4")),
        Case(("oci:nowhere", "--gpu", "CPU")),
        Case(("oci:dist:tag",)),
        Case(("--gpu", "CPU", "--key", "other.pub"), another_key),
    ),
    "verify": (
        Case((REFERENCE, *CPU), published),
        Case(("oci:nowhere:x", *CPU)),
        Case(("oci:dist:nope", *CPU)),
        Case((REFERENCE, "--device-model", "H200", "--driver", "580.65")),
        Case((REFERENCE, *CPU, "--key", "other.pub"), another_key),
        Case((REFERENCE, *CPU, "--max-age", "month")),
    ),
    "pull": (
        Case((REFERENCE, *CPU, "--dry-run"), published),
        Case(("dist", *CPU)),
        Case((REFERENCE, "--device-model", "H200", "--driver", "580.65")),
        Case((REFERENCE, *CPU, "--key", "nowhere.pub")),
        Case((REFERENCE, *CPU, "--max-age", "0m")),
        Case((REFERENCE, *CPU), no_engine),
    ),
    "run": (
        Case((REFERENCE, *CPU, "--dry-run", "--", "python3", "-V"), published),
        Case((REFERENCE, *CPU, "--print", "docker", "--", "python3", "train.py")),
        Case((REFERENCE, *CPU, "--print", "kubernetes", "--", "python3", "train.py")),
        Case((REFERENCE, *CPU)),
        Case(("oci:nowhere:x", *CPU, "--", "true")),
        Case((REFERENCE, *CPU, "--key", "other.pub", "--", "true"), another_key),
        Case((REFERENCE, "--device-model", "H200", "--driver", "580.65", "--", "true")),
        Case((REFERENCE, *CPU, "--", "true"), no_engine),
    ),
    "sbom": (
        Case((REFERENCE,), published),
        Case(("oci:nowhere:x",)),
        Case(("oci:dist:nope",)),
        Case((REFERENCE, "--key", "other.pub"), another_key),
        Case((REFERENCE, "--key", "nowhere.pub")),
        Case((REFERENCE,), lambda world: (world.root / "dist" / "index.json").write_text("{")),
    ),
    "revoke": (
        Case((REFERENCE, "--reason", "all-reduce returns NaN"), published),
        Case((BY_DIGEST, "--reason", "all-reduce returns NaN")),
        Case((REFERENCE,)),
        Case(("oci:nowhere:x", "--reason", "NaN")),
        Case(("oci:dist:nope", "--reason", "NaN")),
        Case(("oci:dist:nope", "--reason", "NaN", "--key", "nowhere.key")),
        Case(
            (BY_DIGEST, "--reason", "NaN"),
            lambda world: (shutil.rmtree(world.root / "dist"), other_publisher(world)),
        ),
    ),
    "policy": (
        Case(("cosign", "--gpu", "H200", "--devices", "8"), published),
        Case(("kyverno",)),
        Case(("cosign", "--max-age", "30d")),
        Case(("cosign", "--devices", "8")),
        Case(("kyverno", "--images", "registry.example.org/*", "--key", "nowhere.pub")),
        Case(("kyverno", "--images", "registry.example.org/*", "--node-label", "gpu")),
        Case(("cosign", "--key", "https://registry.example.org/stackcheck.pub")),
    ),
    "promote": (
        Case((REFERENCE, "--to", "oci:mirror"), published),
        Case((REFERENCE,)),
        Case((REFERENCE, "--to", "oci:mirror:tag")),
        Case(("oci:nowhere:x", "--to", "oci:mirror")),
        Case((REFERENCE, "--to", "oci:mirror", "--key", "other.pub"), another_key),
        Case((REFERENCE, "--to", "oci:file"), file_in_place_of("file")),
    ),
    "gc": (
        Case((), lambda world: (published(world), garbage(world))),
        Case(("oci:dist", "--dry-run"), garbage),
        Case(("oci:nowhere",)),
        Case(("oci:dist:tag",)),
        Case(("registry.example.org/images",)),
        Case(("oci:images",)),
        Case((), lambda world: (world.root / "dist" / "index.json").write_text("{")),
    ),
    "status": (
        Case(()),
        Case(("--watch", "30s")),
        Case(("--watch", "soon")),
        Case(("--history", "nowhere")),
        Case(("--since", "month")),
    ),
    "report": (
        Case(("--format", "markdown"), published),
        Case(("--out", "page.html")),
        Case(("--since", "month")),
        Case(("--refresh", "often")),
        Case(("--from", "oci:dist:tag")),
        Case(("--history", "nowhere")),
        Case(("--faults", "matrix.yaml")),
        Case(("--out", "matrix.yaml/page.html")),
        # The page is written, and says that it is not known what is certified.
        Case(("--out", "page.html"), lambda world: (world.root / "dist" / "index.json").write_text("{")),
    ),
    "nightly": (
        Case(("--dry-run",), published),
        Case(()),
        Case(()),
        Case(("--force",), unfit),
        Case(("--force",), failing),
        Case(("--force",), revoking),
        Case(()),
        Case(("--stack", "rocm*"), fresh),
        Case(("--key", "nowhere.key")),
        Case(("--from", "oci:nowhere")),
        Case((), no_engine),
        Case(("install", "--help")),
        Case(("install", "--kubernetes", "--dry-run")),
        Case(("install", "--systemd", "--cron")),
    ),
    # What is wrong is said by the run of the faults, which test_prove.py covers; here: what runs it.
    "prove": (
        Case(("--here",), proven("caught")),
        Case(("--here",), proven("missed")),
        Case(("--image", "oci:nowhere:x"), lambda world: world.run("key")),
        Case(()),
        Case(("--workers", "0")),
        Case(("--here",), lambda world: world.patch.setenv("STACKCHECK_SUITE_PYTHON", "nowhere/python")),
    ),
    "contribute": (
        Case(("run0.json",), measured),
        Case(("nowhere.json",)),
        Case(()),
        Case(("--check", "images")),
    ),
    "baseline": (
        Case(("run0.json", "run1.json", "run2.json"), measured),
        Case(("nowhere.json", "run1.json", "run2.json")),
        Case(("run0.json",)),
        Case(("run0.json", "run0.json", "run1.json")),
        Case(("matrix.yaml", "run1.json", "run2.json")),
        Case(()),
    ),
    # It takes a path only: what is there is a key, is not one, or cannot be made.
    "key": (
        Case(("--key", "my.key")),
        Case(("--key", "matrix.yaml")),
        Case(("--key", "my.pub")),
        Case(("--key", "matrix.yaml/my.key")),
    ),
}


def other_publisher(world: World) -> None:
    """The same image, published with the key of another user."""
    config = world.root.parent / "other-config"
    with world.patch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(config))
        assert world.run("images", "--force").code == 0


PLACEHOLDERS = (
    (re.compile(r"sha256:[0-9a-f]{12,64}"), "sha256:<digest>"),
    (re.compile(r"sha256-[0-9a-f]{64}"), "sha256-<digest>"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(\+00:00|Z)"), "<time>"),
    (re.compile(r"\b\d\d [A-Z][a-z][a-z] \d{4}, \d\d:\d\d UTC"), "<moment>"),
    (re.compile(r"-\d{8}-(\d+)\.[0-9a-f]{8}\b"), r"-<date>-\1.<digest>"),
    (re.compile(r"\b\d{4}-\d\d-\d\d \d\d:\d\d\b"), "<date and time>"),
    (re.compile(r"(?m)(?<= )[0-9a-f]{8}(?= |$)"), "<run-id>"),
    (re.compile(r"^\[ *\d+\.\d s\]", re.MULTILINE), "[<seconds> s]"),
    (re.compile(r"\b\d+\.\d s$", re.MULTILINE), "<seconds> s"),
    (re.compile(r"(?<= GB  )\d+\.\d$", re.MULTILINE), "<seconds>"),  # of a build, on a busy machine
    (re.compile(r"\b\d+:\d\d:\d\d old\b"), "<age> old"),
    (re.compile(r"(-----BEGIN PUBLIC KEY-----\n)[^-]+(-----END)"), r"\1<key>\n\2"),
    (re.compile(r"(?m)^((?:sha256|signed_by) +)[A-Za-z0-9+/]{43}=$"), r"\1<hint>"),
    (re.compile(r"(stackcheck/\S+):[0-9a-f]{12}\b"), r"\1:<key>"),
    (re.compile(r"^\d+ rules", re.MULTILINE), "<n> rules"),
    (re.compile(r"kernel \S+ \(node [0-9a-f]{12}\)"), "kernel <kernel> (node <node>)"),
    (re.compile(r"is \d+:\d\d:\d\d old"), "is <age> old"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "<hex>"),
)


def stable(text: str, root: Path) -> str:
    """The text with a placeholder for each thing that differs from run to run."""
    for path, name in ((root, "<checkout>"), (root.parent, "<tmp>")):
        text = text.replace(str(path), name)
    for pattern, name in PLACEHOLDERS:
        text = pattern.sub(name, text)
    return text


def shown(verb: str, arguments: tuple[str, ...], done: Done, root: Path) -> str:
    """One run as the golden file has it: the command, its exit code, and both streams."""
    words = [f"'{word}'" if re.search(r"[* ]", word) else word for word in (verb, *arguments)]
    command = re.sub(r"\b[0-9a-f]{64}\b", "<hex>", " ".join(words))
    parts = [f"$ stackcheck {command}\n"]
    parts += [
        f"--- {name}\n{stable(text, root)}"
        for name, text in (("stdout", done.out), ("stderr", done.err))
        if text
    ]
    return "".join([*parts, f"--- exit {done.code}\n"])


def test_every_verb_has_cases_and_a_golden_file_and_no_file_is_without_a_verb() -> None:
    assert set(CASES) == set(cli.VERBS)
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{verb}.txt" for verb in cli.VERBS)


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_a_verb_prints_what_its_golden_file_says(
    verb: str, small_checkout: Path, fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("STACKCHECK_SUITE_PYTHON", sys.executable)
    monkeypatch.setattr("stackcheck.cli.make._program", lambda: "stackcheck")
    world = World(root=small_checkout, engine=fake_engine, patch=monkeypatch, capsys=capsys)
    runs = [shown(verb, ("--help",), world.run(verb, "--help"), small_checkout)]
    codes = []
    for case in CASES[verb]:
        if case.before:
            case.before(world)
        done = world.run(verb, *case.arguments)
        codes.append(done.code)
        runs.append(shown(verb, case.arguments, done, small_checkout))
    assert 0 in codes, "one success"
    assert len([code for code in codes if code]) >= 3, "its likely errors"
    assert 1 not in codes, "a defect"
    path, text = GOLDEN / f"{verb}.txt", "\n".join(runs)
    if os.environ.get(WRITE):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"{WRITE}=1 writes {path.name} anew; review the diff"


def test_no_golden_file_shows_what_differs_from_run_to_run() -> None:
    for path in GOLDEN.iterdir():
        text = path.read_text(encoding="utf-8")
        assert "/tmp/" not in text, path
        assert not re.search(r"[0-9a-f]{32}", text), path
