"""An environment that nobody tuned for changes no answer, and is no traceback, no hang and no rubbish.

Each member of each axis is in one draw, beside a member of another axis that is drawn at random.
"""

import ast
import dataclasses
import functools
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from small_checkout import ROOT
from small_images import new_key
from stackcheck.certificate import keys
from stackcheck.errors import FileError
from stackcheck.files import users
from waits import run_program

MAIN = "from stackcheck.cli import main; main()"
VERBS = {
    "list": ("list",),
    "judge": ("judge", f"{ROOT}/docs/results/suites-h100-x1-standard.json"),
    "refused": ("explain", "rocm=7.2.4", "torch=99"),
    "wrong": ("list", "--jsn"),
    "pull": ("pull", "registry.invalid/x/y:z"),
}
MODULES = ("json", "random", "types", "queue", "pip", "harness", "vendors", "re")


@dataclasses.dataclass
class Place:
    """Where and how a stranger calls the tool."""

    folder: Path
    environment: dict[str, str]
    cwd: Path = ROOT
    root: Path | None = None  # None: the verb looks for it
    within: tuple[str, ...] = ()  # the program that starts the shell
    before: str = ""  # lines of sh
    after: str = ""  # redirections
    said: bool = True  # whether the streams still say what the verb says
    own_codes: tuple[int, ...] = ()

    def set(self, **values: str | None) -> None:
        for name, value in values.items():
            self.environment.pop(name, None)
            if value is not None:
                self.environment[name] = value


def checkout(name: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.root = place.folder / name
        place.root.symlink_to(ROOT)

    return change


def modules(place: Place) -> None:
    place.cwd, place.root = place.folder, ROOT
    for name in MODULES:
        (place.cwd / f"{name}.py").write_text("raise SystemExit('the module of the current folder')\n")


def gone(place: Place) -> None:
    place.before, place.own_codes = f"cd {place.folder} && mkdir gone && cd gone && rmdir ../gone", (10,)


def variables(**values: str | None) -> Callable[[Place], None]:
    return lambda place: place.set(**values)


def streams(after: str, *own_codes: int, said: bool = False) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.after, place.said, place.own_codes = after, said, own_codes

    return change


def before(line: str) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.before = f"{line}; {place.before or ':'}"

    return change


def machine(line: str, *own_codes: int) -> Callable[[Place], None]:
    def change(place: Place) -> None:
        place.within = ("unshare", "--mount", *(() if os.geteuid() == 0 else ("--map-root-user",)))
        place.own_codes = own_codes
        before(line)(place)

    return change


AXES: dict[str, tuple[Callable[[Place], None], ...]] = {
    "checkout": (
        modules,
        *map(checkout, ("two words", "a:b", "a\nb", "a[b]*{c}", "Übung-проект", "n" * 200)),
    ),
    "folder": (gone,),
    "temporary": (variables(TMPDIR="/nonexistent"), variables(TMPDIR=""), variables(TMPDIR="relative")),
    "rights": (before("umask 077"), before("umask 000"), before("ulimit -n 32")),
    "python": (
        variables(PYTHONWARNINGS="error"),
        variables(PYTHONOPTIMIZE="2"),
        variables(PYTHONSAFEPATH="1"),
        variables(PYTHONUTF8="0", LC_ALL="C", PYTHONCOERCECLOCALE="0"),
    ),
    "terminal": (variables(TERM="dumb", NO_COLOR="1"), variables(COLUMNS="-5"), variables(TERM=None)),
    "streams": (
        streams("<&-", said=True),
        streams(">&-"),
        streams("<&- >&- 2>&-"),
        streams("2>&1 | true"),
        streams("| head -c 1 >&2"),
        streams(">/dev/full", 10),
        streams("2>/dev/full", 10),
    ),
    "machine": (
        machine("umount -l /proc", 10),
        machine("umount -l /sys"),
        machine("umount -l /dev"),
        machine("mount -t tmpfs none /etc"),
    ),
    "clock": (variables(TZ="Asia/Kathmandu"), variables(TZ="none/such"), variables(SOURCE_DATE_EPOCH="x")),
}
MEMBERS = [(axis, change) for axis, changes in AXES.items() for change in changes]


def draws() -> list[tuple[str, tuple[Callable[[Place], None], ...]]]:
    """A verb, and the changes of its environment: each member once, with one of another axis."""
    rng = random.Random(27)
    left = rng.sample(MEMBERS, len(MEMBERS))
    found = []
    while left:
        axis, change = left.pop()
        other = next((one for one in left if one[0] != axis), None)
        if other:
            left.remove(other)
        axes = {axis, *(other or ())[:1]}
        drawn = rng.choice([*VERBS][:4])
        verb = "judge" if "checkout" in axes else "list" if "machine" in axes else drawn  # what asks for it
        found.append((verb, (change, *([other[1]] if other else []))))
    return found


def call(place: Place, verb: str) -> subprocess.CompletedProcess[str]:
    words = [*VERBS[verb], *(["--root", str(place.root)] if place.root else [])]
    program = f'{place.before or ":"}\n"$0" -P -c "$@" {place.after}\nexit ${{PIPESTATUS[0]}}'
    return subprocess.run(
        [*place.within, "bash", "-c", program, sys.executable, MAIN, *words],
        cwd=place.cwd,
        env=place.environment,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=300,
        check=False,
    )


def made(folder: Path) -> Place:
    for name in ("home", "tmp"):
        (folder / name).mkdir(parents=True)
    kept = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", "PYTHONPATH": str(ROOT)}
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONDONTWRITEBYTECODE": "1"}
    return Place(folder=folder, environment=kept | own)


@functools.cache
def plain(verb: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return call(made(folder / f"plain-{verb}"), verb)


@pytest.fixture
def folder() -> Iterator[Path]:
    """On the disk: a draw takes /dev away, in which the other folders of these tests may be."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize(("verb", "changes"), draws(), ids=[str(n) for n in range(len(draws()))])
def test_an_environment_changes_no_answer(verb, changes, folder, tmp_path_factory):
    usual = plain(verb, tmp_path_factory.getbasetemp())
    place = made(folder)
    for change in changes:
        change(place)
    done = call(place, verb)
    said = done.stdout + done.stderr
    assert not {"Traceback", "Exception"} & {*said.split()}, said
    assert done.returncode in {usual.returncode, *place.own_codes}, said
    if place.said and done.returncode == usual.returncode:
        assert done.stdout.replace(str(place.root or ROOT), str(ROOT)) == usual.stdout
    assert not any((place.folder / "tmp").iterdir())


@pytest.mark.parametrize("name", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"])
def test_certificates_that_are_not_there_are_named(name, tmp_path):
    place = made(tmp_path)
    place.set(**{name: "/no/such.pem"})
    own = place.folder / "home" / ".config" / "stackcheck" / "stackcheck.pub"
    own.parent.mkdir(parents=True)
    own.write_bytes(keys.public_pem(new_key().public_key()))
    done = call(place, "pull")
    assert (done.returncode, "where: /no/such.pem" in done.stderr) == (10, True), done.stderr
    assert "Traceback" not in done.stderr


def test_where_a_users_files_are(monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    monkeypatch.setenv("HOME", "/somebody")
    assert str(users.folder("XDG_CONFIG_HOME")) == "/somebody/.config"
    monkeypatch.setattr(users.os, "geteuid", lambda: 2**31 - 7)
    for home in ("", "relative"):
        monkeypatch.setenv("HOME", home)
        with pytest.raises(FileError, match="no home") as caught:
            users.folder("XDG_CONFIG_HOME")
        assert str(caught.value.where) == f"user {2**31 - 7}"


def test_what_other_programs_print_may_have_any_bytes():
    for path in sorted((ROOT / "stackcheck").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = {word.arg for word in node.keywords} if isinstance(node, ast.Call) else set()
            if ast.unparse(getattr(node, "func", ast.Constant(0))).startswith("subprocess."):
                assert "errors" in names or not names & {"text", "encoding"}, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("umount -l /proc", "/proc is not mounted: mount -t proc proc /proc"),
        ("ulimit -n 20", "20 open files are allowed, 256 are needed: ulimit -n 256"),
        ("mount -t tmpfs -o size=1m none $TMPDIR", "has 1 MiB free, 64 are needed: TMPDIR names another"),
    ],
)
def test_the_suites_say_what_the_machine_lacks(line, words, tmp_path):
    place = made(tmp_path)
    machine(line)(place)
    program = f'{place.before}; "$@"'
    command = [sys.executable, "-m", "pytest", "tests/", "--gpu-vendor=cpu", "-p", "no:cacheprovider"]
    done = run_program(
        [*place.within, "bash", "-c", program, "bash", *command], cwd=ROOT, env=place.environment, timeout=300
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert f"ERROR: the machine lacks what every run needs: {words}" in done.stderr.replace(
        place.environment["TMPDIR"] + " ", ""
    )
