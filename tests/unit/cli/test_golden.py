"""What each verb prints: its help, one success and its most likely errors, held to the files in golden/.

Those in stories/ are of several verbs, one after another. Each file is a script: its `$ stackcheck …` run in
the checkout that the commands before them left, and each `# …` above one is a method of `World`, which
changes this world first. A new case is its lines there; then `STACKCHECK_WRITE_GOLDEN=1 pytest
tests/unit/cli/test_golden.py` writes what it prints: review the diff. The flow is real; only the engine and
the host are fake. What changes from run to run is <a placeholder>.

Some verbs cannot have five likely errors. doctor: what it finds is a table, no error. first-host: its steps
are commands of their own. list, compat: they read files and compare. outdated: it asks pip
(test_pip_settings.py). prove: the run of the faults says what is wrong (test_prove.py). key: it takes a path
only.
"""

import base64
import contextlib
import dataclasses
import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import kept_runs
import small_fleet
import speed_results
from small_checkout import CPU_STACK, Done, FakeEngine, answer, call
from small_images import new_key
from stackcheck import __version__, cli
from stackcheck.certificate import keys
from stackcheck.cli import build
from stackcheck.engine import doctor, first_host
from stackcheck.engine.doctor import HostFinding
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet.slurm import Slurm
from stackcheck.history.history import open_history
from stackcheck.imaging import base_sources, bootstrap, host_base
from stackcheck.imaging.dpkg import Database
from stackcheck.imaging.wheels import installed
from stackcheck.matrix.stack import Stack
from stackcheck.nightly.install import CARRIED
from stackcheck.oci.layout import OciLayout
from stackcheck.proof import prove

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

GOLDEN, STORIES = Path(__file__).parent / "golden", Path(__file__).parent / "stories"
SCRIPTS = sorted([*GOLDEN.iterdir(), *STORIES.iterdir()])
WRITE = "STACKCHECK_WRITE_GOLDEN"
RESULT = f"build/{CPU_STACK}/run/result.json"
GEMM = "test_kernels.py::test_gemm"
CHECK = "test_devices.py::test_device_count"
Capsys = pytest.CaptureFixture[str]
REAL_SLURM = Slurm  # worlds replace it
REAL_CONNECTED = build.connected  # the fixture `engine` replaces it
PLANTED_RULES = """
  - id: R5-planted
    when: {arch: gfx950}
    require: {rocm: '<7.0'}
    because: planted
    source: CM
  - id: R1-planted
    when: {wheels: upstream, vendor: amd, torch: 2.13.0}
    require: {rocm: "6.4"}
    because: planted
    source: TI
"""
WAIVER = f"""
  waivers:
    - check: {GEMM}
      stacks: [{CPU_STACK}]
      reason: a fault that is known and tracked
      issue: pytorch/pytorch#196678
      by: the owner of this checkout
      until: 2999-12-31
"""
COMPILED = b"\x7fELF a Python of no package"
DIGEST = hashlib.sha256(COMPILED).hexdigest()
# Digests in the words of a command, which the files do not show.
SPELLED = {"<hex>": "0" * 64, "<python>": DIGEST, "<PYTHON>": DIGEST.upper(), "<half>": DIGEST[:-1]}
SPELLED["<run>"] = "f" * 32  # the id of another run


def spelled_out(word: str) -> str:
    for name, digest in SPELLED.items():
        word = word.replace(name, digest)
    return word


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
    """What the lines above a command may change before it runs: each is a method, with words."""

    root: Path
    engine: FakeEngine
    patch: pytest.MonkeyPatch
    capsys: Capsys

    def run(self, *arguments: str) -> Done:
        return call(self.capsys, *map(self._spelled_out, arguments))

    def _spelled_out(self, argument: str) -> str:
        if argument == "oci:dist@<digest>":  # of the image there
            return f"oci:dist@{OciLayout(self.root / 'dist').read_manifest(CPU_STACK).digest}"
        return spelled_out(argument)

    def edit(self, old: str, new: str, name: str = "matrix.yaml") -> None:
        path = self.root / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))

    def after(self, *arguments: str) -> None:
        """Another command, which worked or gave a verdict."""
        assert self.run(*arguments).code in {0, 6, 9}

    def written(self, name: str, text: str) -> None:
        (self.root / name).write_text(text)

    def removed(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()

    def file_in_place_of(self, name: str) -> None:
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("in the way")

    def setenv(self, name: str, value: str) -> None:
        self.patch.setenv(name, value)

    def failing(self) -> None:
        self.engine.answer = answer((GEMM, "failed"))

    def unfit(self) -> None:
        self.engine.answer = answer((GEMM, "invalid"))

    def no_result(self) -> None:
        self.engine.answer = lambda _told: None

    def label(self, name: str, value: str) -> None:
        self.engine.labels[name] = value

    def nodes_leave(self, failing: str = "") -> None:
        """Nodes without a cluster: they leave the files that nodes leave."""
        self.patch.setattr("stackcheck.cli.fleet.secrets.token_hex", lambda _bytes: "feedbeef")
        self.patch.setattr("stackcheck.fleet.slurm.Slurm", small_fleet.LeavingEngine)
        self.patch.setattr(small_fleet.LeavingEngine, "failing", failing)

    def a_site_with_slurm(self) -> None:
        self.patch.setattr("stackcheck.fleet.slurm.Slurm", REAL_SLURM)

    def other_user(self) -> None:
        self.patch.setattr("stackcheck.suite.steering.uid", lambda: 60706)

    def ran(self) -> None:
        self.engine.answer = answer()
        self.after("test", CPU_STACK)

    def bare(self) -> None:
        """A run by pytest alone, which knows no image and no stack."""
        self.ran()
        path = self.root / RESULT
        path.write_text(json.dumps(json.loads(path.read_text()) | {"image": None, "stack_id": None}))

    def of_a_lower_tier(self) -> None:
        """A smoke run, which certified a processor until the policy asked for more."""
        self.ran()
        self.edit("cpu: smoke", "cpu: standard")

    def policy_asks_for_more(self) -> None:
        self.engine.answer = answer()
        self.after("certify", CPU_STACK, "--force")
        self.edit("cpu: smoke", "cpu: standard")

    def on_debian_12(self) -> None:
        told = {
            "ID": "debian",
            "VERSION_CODENAME": "bookworm",
            "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)",
        }
        self.patch.setattr("stackcheck.engine.apt.host_release", lambda: told)

    def without_python(self) -> None:
        """A host that has nothing but dpkg."""
        folder = self.root / "dpkg"
        folder.mkdir()
        stanza = "Package: dpkg\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1\n"
        (folder / "status").write_text(stanza)
        self.patch.setattr(host_base, "Database", lambda _admin: Database(folder))

    def small_environment(self) -> None:
        """An environment with one package; the interpreter itself is not asked."""
        site, scripts = self.root / "env" / "site", self.root / "env" / "bin"
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
            prefix=self.root / "env",
            paths={"scripts": scripts, "purelib": site, "platlib": site},
            infos={"thing": info},
        )
        self.patch.setattr(installed, "environment", lambda _interpreter: found)

    def another_key(self) -> None:
        (self.root / "other.pub").write_bytes(keys.public_pem(new_key().public_key()))

    def other_publisher(self) -> None:
        """The same image, published with the key of another user."""
        with self.patch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(self.root.parent / "other-config"))
            self.after("images", "--force")

    def fresh(self) -> None:
        """The images of another day, published anew, and no night yet."""
        self.engine.answer = answer()
        for name in ("dist", "build"):
            shutil.rmtree(self.root / name, ignore_errors=True)
        self.after("images")

    def revoking(self) -> None:
        """One node may take a certificate back."""
        self.edit("\npolicy:\n", "\npolicy:\n  revoke: auto\n")

    def broken_matrix(self) -> None:
        self.edit("publish: oci:dist", "publish: [oci:dist]")

    def no_stacks(self) -> None:
        self.patch.setattr("stackcheck.matrix.resolve.load_stacks", lambda *_a: ())

    def planted_rules(self) -> None:
        self.edit("rules:\n", f"rules:{PLANTED_RULES}", "images/compat.yaml")

    def waived(self) -> None:
        self.edit("\npolicy:\n", f"\npolicy:{WAIVER}")

    def planted_variable(self) -> None:
        self.edit("  - runtime: cpu\n", "  - runtime: cpu\n    env: {PLANTED: yes}\n")

    def image_of(self, what: str, *words: str) -> None:
        """Every image has this processor, or Python that does not start or does not find its packages."""
        setattr(self.engine, what, words[0] if what != "not_found" else list(words))

    def python_of_no_package(self, more: str = "") -> None:
        self.engine.image = {"/usr/local/bin/python3": COMPILED + more.encode()}

    def package(self, name: str, head: str) -> None:
        """The record of a package in every image: another one's in its place, or one more."""
        for record in self.engine.inventory:
            if f"Name: {name}\n" in record.get("head", ""):
                record["head"] = head.replace(", ", "\n")
                return
        added = {"kind": "python", "place": f"/x/{name}.dist-info", "head": head.replace(", ", "\n")}
        self.engine.inventory.insert(0, added)

    def folder(self, name: str) -> None:
        (self.root / name).mkdir()

    def nights(self, name: str = "") -> None:
        """A history of ten nights; the fourth one failed, and one record may be damaged."""
        if name == "damaged":
            min((self.root / "build" / "history" / "records").rglob("*.gz")).write_bytes(b"rust")
            return
        history = open_history(self.root)
        for number in range(10):
            verdict = kept_runs.failed(kept_runs.GEMM) if number == 3 else kept_runs.PASSED
            history.append(kept_runs.body(number), verdict, None, source="test")

    def copied(self, old: str, new: str) -> None:
        (self.root / new).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(self.root / old, self.root / new)

    def changed(self, name: str, change: str) -> None:
        """Members of a JSON file, or of the first check of a result, as they are in `change`."""
        document = json.loads((self.root / name).read_text())
        told = json.loads(change)
        if "checks" in told:
            document["checks"][0] |= told.pop("checks")
        (self.root / name).write_text(json.dumps(document | told))

    def no_engine(self) -> None:
        self.setenv("DOCKER_HOST", f"unix://{self.root}/none.sock")
        self.patch.setattr(build, "connected", REAL_CONNECTED)

    def finds(self, what: str) -> None:
        """What `doctor` sees of the host: an engine, or nothing."""
        ok = what == "engine"
        found = "29.1" if ok else "no daemon"
        rows = (
            HostFinding(name="engine", ok=ok, needed=True, found=found, fix="FIX"),
            HostFinding(name="amd GPUs", ok=False, needed=False, found="no device"),
        )
        self.patch.setattr(doctor, "examine", lambda *_arguments, **_options: rows)
        way = base_sources.Way(name="this host's archive of debian")
        self.patch.setattr(bootstrap, "ready", lambda *_arguments: (way,))

    def steps_that_end_well(self) -> None:
        """Each step of the first hour is a process of its own."""
        self.patch.setattr(first_host, "_run", lambda *_arguments: (0, ""))

    def newest(self, *pins: str) -> None:
        """The package indexes, which no unit test asks."""
        versions = dict(pin.split("=") for pin in pins)
        self.patch.setattr(
            "stackcheck.recipe.indexes.versions",
            lambda name, **_options: (versions[name],) if name in versions else (),
        )

    def locked(self, *missing: str) -> None:
        outcome = SimpleNamespace(missing=missing, kept=())
        self.patch.setattr("stackcheck.recipe.lock.lock", lambda *_arguments: outcome)

    def lock_that_cannot_be_written(self) -> None:
        def write(stack: Stack, images: Path, _upstream: object) -> None:
            write_atomically(images / stack.id / "requirements.lock" / "x", (b"",))

        self.patch.setattr("stackcheck.recipe.lock.lock", write)

    def measured(self) -> None:
        speed_results.write_three(self.root)

    def proven(self, state: str) -> None:
        """The runs of the faults, which take minutes, have ended like this."""
        fault = {
            "test": "t",
            "name": "a GPU is missing",
            "check": CHECK,
            "vendor": "amd",
            "reason": "it passed",
        }
        line = {
            "checks": [CHECK, *["test_x.py::test_new"] * (state == "missed")],
            "faults": [fault | {"expected": "failed", "state": state}],
            "healthy": [fault | {"name": "nothing", "state": "passed"}],
            "failed": [],
        }
        told = prove.FaultRun.model_validate_json(json.dumps(line))
        self.patch.setattr(prove, "beside", lambda *_a, **_k: contextlib.nullcontext(lambda: told))
        self.patch.setattr(prove, "here", lambda *_a, **_k: told)

    def garbage(self) -> None:
        body = b"a layer of nothing"
        (self.root / "dist" / "blobs" / "sha256" / hashlib.sha256(body).hexdigest()).write_bytes(body)


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
    (re.compile(r'"(kernel|node)": "[^"]+"'), r'"\1": "<\1>"'),
    (re.compile(r'"seconds": \d+\.\d+'), '"seconds": <seconds>'),
    (re.compile(r"\b\d+:\d\d:\d\d old\b"), "<age> old"),
    (re.compile(r"(-----BEGIN PUBLIC KEY-----\n)[^-]+(-----END)"), r"\1<key>\n\2"),
    (re.compile(r"(?m)^((?:sha256|signed_by) +)[A-Za-z0-9+/]{43}=$"), r"\1<hint>"),
    (re.compile(r"(stackcheck/\S+):[0-9a-f]{12}\b"), r"\1:<key>"),
    (re.compile(r"^\d+ rules", re.MULTILINE), "<n> rules"),
    (re.compile(rf'"version": "{re.escape(__version__)}"'), '"version": "<version>"'),
    (re.compile(r'"rules": \d+'), '"rules": <n>'),
    (re.compile(r"(Dockerfile, line )\d+"), r"\1<n>"),
    (re.compile(r"urn:uuid:[0-9a-f-]{36}"), "urn:uuid:<id>"),
    (re.compile(r"kernel \S+ \(node [0-9a-f]{12}\)"), "kernel <kernel> (node <node>)"),
    (re.compile(r"is \d+:\d\d:\d\d old"), "is <age> old"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), "<hex>"),
)


def stable(text: str, root: Path) -> str:
    """The text with a placeholder for each thing that differs from run to run."""
    program = Path(sys.executable).parent / "stackcheck"
    for path, name in ((root, "<checkout>"), (root.parent, "<tmp>"), (program, "<stackcheck>")):
        text = text.replace(str(path), name)
    for pattern, name in PLACEHOLDERS:
        text = pattern.sub(name, text)
    return text


def cases(script: str) -> Iterator[tuple[list[str], str]]:
    """Each command line of a golden file after `stackcheck`, and the lines above it that change the world."""
    for above, command in re.findall(r"(?m)((?:^# .+\n)*)^\$ stackcheck (.+)$", script):
        yield [line.removeprefix("# ") for line in above.splitlines()], command


def shown(changes: list[str], command: str, done: Done, root: Path) -> str:
    """One run as the golden file has it: the world, the command, its exit code, and both streams."""
    parts = [*(f"# {line}\n" for line in changes), f"$ stackcheck {command}\n"]
    parts += [
        f"--- {name}\n{stable(text, root)}"
        for name, text in (("stdout", done.out), ("stderr", done.err))
        if text
    ]
    return "".join([*parts, f"--- exit {done.code}\n"])


def test_every_verb_has_a_golden_file_and_no_file_is_without_a_verb():
    assert sorted(path.name for path in GOLDEN.iterdir()) == sorted(f"{verb}.txt" for verb in cli.VERBS)


def tree(folder: Path) -> dict[Path, bytes | None]:
    """Every file below a folder, but for the index of the history: SQLite writes it also when it reads."""
    paths = (path for path in folder.rglob("*") if not path.name.startswith("index.sqlite"))
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def step(world: World, changes: list[str], command: str) -> Done:
    """One command of a script, after the changes above it; what is a dry run or refused did nothing."""
    for change in changes:
        name, *words = shlex.split(change)
        getattr(world, name)(*map(spelled_out, words))
    dry = "--dry-run" in command
    before = tree(world.root.parent) if dry else {}
    at_work = len(world.engine.builds), len(world.engine.runs)
    done = world.run(*shlex.split(command))
    assert not dry or tree(world.root.parent) == before, command
    if dry or done.code in {2, 3}:
        assert (len(world.engine.builds), len(world.engine.runs)) == at_work, command
    return done


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_prints_what_its_file_says(path, small_checkout, fake_engine, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("STACKCHECK_SUITE_PYTHON", sys.executable)
    monkeypatch.setattr("stackcheck.cli.make._program", lambda: "stackcheck")
    monkeypatch.setattr("platform.node", lambda: "gpu-1")
    monkeypatch.setattr("stackcheck.files.users.name", lambda: "operator")
    for name in {*CARRIED} - {"XDG_CONFIG_HOME", "XDG_DATA_HOME", "STACKCHECK_WHEEL_CACHE"}:  # own_home's
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stackcheck.imaging.platforms.native", lambda: "linux/amd64")
    world = World(root=small_checkout, engine=fake_engine, patch=monkeypatch, capsys=capsys)
    script = path.read_text(encoding="utf-8")
    runs, codes = [], []
    for changes, command in cases(script):
        done = step(world, changes, command)
        codes.append(done.code)
        runs.append(shown(changes, command, done, small_checkout))
    if path.parent == GOLDEN:
        assert script.startswith(f"$ stackcheck {path.stem} --help\n")
        assert 0 in codes[1:], "one success"
        assert len([code for code in codes if code]) >= 3, "its likely errors"
    assert 1 not in codes, "a defect"
    text = "\n".join(runs)
    if os.environ.get(WRITE):
        path.write_text(text, encoding="utf-8")
    assert text == script, f"{WRITE}=1 writes {path.name} anew; review the diff"


def test_no_golden_file_shows_what_differs_from_run_to_run():
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert not re.search("/tmp/|/[.]?venv/bin/stackcheck", text), path
        assert not re.search(r"[0-9a-f]{32}", text), path
