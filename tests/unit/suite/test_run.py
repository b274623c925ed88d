"""The container of a run gets what was digested, and no more than it needs."""

import dataclasses
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import waits
from fake_runs import ROOT, FakeEngine, healthy, make_plan, run
from stackcheck.errors import ConfigurationError
from stackcheck.suite import controller, steering
from stackcheck.suite import run as suite
from stackcheck.vendors import amd, nvidia

pytestmark = pytest.mark.usefixtures("frozen_once")


def test_the_container_gets_least_privilege(tmp_path):
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    assert (spec.read_only, spec.network, spec.cap_drop) == (True, "none", ("ALL",))
    assert spec.security_opt == ("no-new-privileges",)
    assert spec.user not in {None, "0", "0:0", "root"}
    assert [mount.target for mount in spec.mounts if not mount.read_only] == ["/stackcheck/out"]


@pytest.mark.parametrize("reference", ["sha256:" + "5" * 64, "stackcheck/image:012345", "other.org/x:1"])
def test_an_image_from_elsewhere_is_known_by_the_name_under_which_it_was_tested(tmp_path, reference):
    """Whatever the engine of a host calls it: a test, a night and a node of a fleet keep one name."""
    plan = make_plan(tmp_path)
    image = dataclasses.replace(plan.subject.image, stack_id=None, reference=reference)
    subject = dataclasses.replace(plan.subject, name="rocm-pytorch-2.9", stack=None, image=image)
    facts = suite._run_file(dataclasses.replace(plan, subject=subject), "1" * 32)
    assert facts["image"]["reference"] == "rocm-pytorch-2.9"


def test_in_the_container_the_identified_python_starts_the_agent(tmp_path):
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    assert spec.entrypoint == ("/usr/bin/python3",)
    targets = {mount.target: mount for mount in spec.mounts}
    program = Path(spec.command[1])
    assert (targets["/stackcheck/tests"].source / program.relative_to("/stackcheck/tests")).is_file()
    assert targets["/stackcheck/tests"].read_only


def test_the_controller_is_this_python_with_the_frozen_pytest_and_nothing_of_the_image(tmp_path):
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    judge: Any = spec.beside
    assert judge.command[:3] == (sys.executable, "-I", "-S")
    (launcher,) = [Path(word) for word in judge.command if word.endswith("launcher.py")]
    assert launcher == tmp_path / "suite" / "runner" / "launcher.py"
    assert (launcher.with_name("pytest") / "_pytest").is_dir()
    assert {*judge._env} <= {"PATH", "HOME", "LANG", "TMPDIR", *steering.OURS}


def test_nothing_that_the_controller_writes_or_reads_by_name_is_in_the_container_s_folder(tmp_path):
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    judge: Any = spec.beside
    (writable,) = [mount.source for mount in spec.mounts if not mount.read_only]
    assert not judge.folder.is_relative_to(writable)
    assert not (judge.folder / "children").is_relative_to(writable)
    assert judge.folder / "children" in spec.quota_folders


def test_the_seed_of_generated_cases_reaches_the_suites_and_makes_another_run(tmp_path):
    plans = [make_plan(tmp_path, case_seed=seed) for seed in (0, 739_000)]
    told = [run(plan, tmp_path).specs[0].beside.command for plan in plans]  # type: ignore[union-attr]
    assert "--case-seed=739000" in told[1]
    assert set(told[1]) - set(told[0]) == {"--case-seed=739000"}
    assert plans[0].key() != plans[1].key()


HOSTILE = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONPATH": "/evil",
    "PYTHONPYCACHEPREFIX": "/evil",
    "PYTHON_OF_TOMORROW": "/evil",
    "PYTEST_ADDOPTS": "-k nothing",
    "PYTEST_PLUGINS": "evil",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "",
    "LD_PRELOAD": "/evil.so",
    "LD_AUDIT": "/evil.so",
    "GLIBC_TUNABLES": "x",
    "STACKCHECK_STACK_FILE": "/evil.json",
    "CUDA_VISIBLE_DEVICES": "0",
    "HIP_VISIBLE_DEVICES": "0",
    "ROCR_VISIBLE_DEVICES": "0",
    "GPU_DEVICE_ORDINAL": "0",
    "ZE_AFFINITY_MASK": "0",
    "TOMORROWS_VISIBLE_DEVICES": "0",
}
HARMLESS = {"PATH": "/usr/bin", "LD_LIBRARY_PATH": "/opt/rocm/lib", "PYTORCH_VERSION": "2.13.0", "LANG": "C"}


def test_what_an_image_sets_chooses_nothing_that_runs_and_hides_no_device(tmp_path):
    engine = FakeEngine(healthy)
    engine.env = HOSTILE | HARMLESS
    suite.run(make_plan(tmp_path), engine, out=tmp_path, report=lambda _line: None)  # type: ignore[arg-type]
    (spec,) = engine.specs
    assert set(HOSTILE) <= set(spec.env)
    assert [spec.env[name] for name in HOSTILE if name not in steering.OURS] == [None] * (len(HOSTILE) - 2)
    assert spec.env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] == "1"
    assert spec.env["PYTEST_PLUGINS"] == "pytest_timeout,xdist.plugin"
    assert not set(HARMLESS) & set(spec.env)


@pytest.mark.parametrize(
    ("vendor", "hidden", "shown"),
    [
        ("nvidia", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"),
        ("amd", "ROCR_VISIBLE_DEVICES", "AMD_VISIBLE_DEVICES"),
    ],
)
def test_all_devices_are_shown_whatever_an_image_says(vendor, hidden, shown):
    found = steering.environment({hidden, shown}, vendor, {shown: "0"})
    assert (found[hidden], found[shown]) == (None, "all")


def test_the_user_of_the_container_has_no_account_and_only_root_comes_to_its_folder(tmp_path):
    out = tmp_path / "out"
    (spec,) = run(make_plan(out), out).specs
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    number = int((spec.user or "").partition(":")[0])
    assert (out / "run").stat().st_uid == os.geteuid()
    assert (out / "run" / "inside").stat().st_uid == number
    if os.geteuid() == 0:
        with pytest.raises(KeyError):
            pwd.getpwuid(number)


def of_vendor(plan: suite.RunPlan, vendor: str) -> suite.RunPlan:
    return dataclasses.replace(plan, host=dataclasses.replace(plan.host, vendor=vendor))


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_runs_on_one_host_see_each_other_s_devices_and_may_pin_memory(tmp_path, monkeypatch, vendor):
    monkeypatch.setattr(controller, "FOLDER", tmp_path / "leases")
    monkeypatch.setattr(nvidia, "_listed", lambda: ([0], []))
    (tmp_path / "dev").mkdir()
    for module, node in ((amd, "kfd"), (nvidia, "nvidia0")):
        monkeypatch.setattr(module, "DEV", tmp_path / "dev")
        (tmp_path / "dev" / node).symlink_to("/dev/null")
    for name in ("one", "two"):
        (spec,) = run(of_vendor(make_plan(tmp_path / name), vendor), tmp_path / name).specs
        judge: Any = spec.beside
        assert f"--lease-dir={tmp_path / 'leases'}" in judge.command
        assert spec.ulimits == {"memlock": -1}
    made = (tmp_path / "leases").stat()
    assert (stat.S_IMODE(made.st_mode), made.st_gid) == (0o3770, controller.group())


def test_a_lease_folder_that_all_users_can_write_is_closed_and_another_user_s_is_refused(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(controller, "FOLDER", tmp_path / "leases")
    (tmp_path / "leases").mkdir()
    (tmp_path / "leases").chmod(0o1777)  # as older releases made it
    assert controller.folders("amd")
    assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o3770

    def refuse(*_: object) -> None:
        raise PermissionError

    (tmp_path / "leases").chmod(0o1777)
    monkeypatch.setattr(os, "fchown", refuse)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        controller.folders("amd")


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_host_without_devices_asks_for_no_limit_that_its_daemon_may_refuse(tmp_path, monkeypatch, vendor):
    monkeypatch.setattr(controller, "FOLDER", tmp_path / "leases")
    monkeypatch.setattr(nvidia, "CDI_SPECS", ())  # this machine may have one
    for module in (amd, nvidia):
        monkeypatch.setattr(module, "DEV", tmp_path / "dev")
    (spec,) = run(of_vendor(make_plan(tmp_path), vendor), tmp_path).specs
    assert spec.ulimits == {}


def test_the_bare_machine_and_the_containers_share_one_lease_folder():
    source = ROOT / "tests" / "acceptance" / "harness" / "leases.py"
    assert f'Path("{controller.FOLDER}")' in source.read_text()


def test_a_link_in_the_place_of_the_lease_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "leases").symlink_to("/etc")
    monkeypatch.setattr(controller, "FOLDER", tmp_path / "leases")
    with pytest.raises(ConfigurationError, match="not a directory"):
        run(of_vendor(make_plan(tmp_path), "amd"), tmp_path)


def test_a_folder_without_permissions_in_the_run_folder_is_removed():
    """By a user without rights: root removes such a folder anyway."""
    folder = Path(tempfile.mkdtemp(prefix="stackcheck-run-"))  # pytest's own folders are closed to others
    child = os.fork()
    if not child:
        code = 1
        try:
            if os.geteuid() == 0:
                os.chown(folder, 65534, 65534)
                os.setgid(65534)
                os.setuid(65534)
            closed = folder / "run" / "a" / "closed"
            (closed / "below").mkdir(parents=True)
            closed.chmod(0)
            suite._remove(folder / "run")
            code = int((folder / "run").exists())
        finally:
            os._exit(code)
    ended = os.waitpid(child, 0)[1]
    shutil.rmtree(folder)
    assert os.waitstatus_to_exitcode(ended) == 0


DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "


@pytest.mark.parametrize(
    ("program", "wait_s", "by"), [("", 60.0, signal.SIGTERM), (DEAF, 0.1, signal.SIGKILL)]
)
def test_a_child_is_asked_to_end_and_one_that_does_not_listen_is_killed(program, wait_s, by):
    code = f"import signal, time; {program}print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        waits.line(process.stdout)
        controller.stop(process, wait_s)
    assert process.returncode == -by
    controller.stop(process)  # which has ended
