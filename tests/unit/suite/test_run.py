"""A run mounts what was digested, asks for no more than it needs, and believes only its own result."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

import result_files
from fake_files import HasFiles
from stackcheck.build.image import Image
from stackcheck.build.provenance import Provenance
from stackcheck.errors import ChecksFailedError, ConfigurationError
from stackcheck.matrix.policy import Policy
from stackcheck.oci.documents import sha256
from stackcheck.suite import device_leases, inputs, steering
from stackcheck.suite import run as suite
from stackcheck.suite.subject import Subject
from stackcheck.vendors import amd, nvidia

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from stackcheck.engine.client import RunSpec
    from stackcheck.suite.inputs import InputDigests

ROOT = Path(__file__).resolve().parents[3]
CONFIG = result_files.CONFIG_DIGEST
HOUR, NONE = dt.timedelta(hours=1), dt.timedelta()


@pytest.fixture(scope="module", autouse=True)
def frozen_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The 530 files are frozen once, and every plan has a link to them: `test_inputs.py` has the copying."""
    folder = tmp_path_factory.mktemp("frozen") / "suite"
    digests = inputs.freeze(ROOT, folder)

    def link(root: Path, target: Path) -> InputDigests:
        assert root == ROOT
        target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder)
        return digests

    with mock.patch.object(inputs, "freeze", link):
        yield


class FakeEngine(HasFiles):
    """Stands in for a container: writes what `answer` makes of run.json, and keeps the RunSpec."""

    def __init__(self, answer: Callable[[dict[str, Any]], str | None], code: int | None = None) -> None:
        self._answer, self._code = answer, code
        self.specs: list[RunSpec] = []
        self.env: dict[str, str] = {}

    def inspect(self, _reference: str) -> Any:
        return SimpleNamespace(env=self.env)

    def run(self, spec: RunSpec) -> int:
        self.specs.append(spec)
        paths = {mount.target: mount.source for mount in spec.mounts}
        told = json.loads(paths["/stackcheck/run.json"].read_text(encoding="utf-8"))
        text = self._answer(told)
        if text is not None:
            (paths["/stackcheck/out"] / "result.json").write_text(text, encoding="utf-8")
        assert spec.on_line is not None
        spec.on_line("last words")
        return result_files.exit_code(text) if self._code is None else self._code


def healthy(told: dict[str, Any]) -> str:
    return json.dumps(of_run(told))


def of_run(told: dict[str, Any], **changes: Any) -> dict[str, Any]:
    same = result_files.told_again(told)
    now = dt.datetime.now(dt.UTC).isoformat()
    document = result_files.result(result_files.check("test_a.py::test_a"), **same, started=now, finished=now)
    return document | changes


def make_plan(out: Path, **changes: Any) -> suite.RunPlan:
    image = Image(
        stack_id=None,
        reference="some:tag",
        config_digest=CONFIG,
        manifest_digest=result_files.DIGEST,
        layout=out / "oci",
        size_bytes=0,
        layers=(),
        reused=False,
        seconds=0.0,
    )
    subject = Subject(
        name="some",
        image=image,
        vendor=changes.pop("vendor", "cpu"),
        policy=Policy(certifies={"cpu": "smoke"}),
        stack=None,
        machines=None,
        provenance=Provenance(),
    )
    return suite.plan(subject, **({"tier": "smoke", "root": ROOT, "out": out} | changes))


def run(
    plan: suite.RunPlan, out: Path, answer: Callable[[dict[str, Any]], str | None] = healthy
) -> FakeEngine:
    engine = FakeEngine(answer)
    suite.run(plan, engine, out=out, report=lambda _line: None)  # type: ignore[arg-type]
    return engine


def test_the_container_gets_least_privilege(tmp_path: Path) -> None:
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    assert (spec.read_only, spec.network, spec.cap_drop) == (True, "none", ("ALL",))
    assert spec.security_opt == ("no-new-privileges",)
    assert spec.user not in {None, "0", "0:0", "root"}
    assert [mount.target for mount in spec.mounts if not mount.read_only] == ["/stackcheck/out"]


def test_only_the_identified_python_starts_and_nothing_of_the_image_before_it(tmp_path: Path) -> None:
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    assert spec.entrypoint == ("/usr/bin/python3",)
    assert spec.command[:2] == ("-I", "-S")
    (launcher,) = [word for word in spec.command if word.endswith("launcher.py")]
    targets = {mount.target: mount for mount in spec.mounts}
    runner = targets[str(Path(launcher).parent)]
    assert runner.read_only
    assert (runner.source / "launcher.py").exists()
    assert (runner.source / "pytest" / "_pytest").is_dir()


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


def test_what_an_image_sets_chooses_nothing_that_runs_and_hides_no_device(tmp_path: Path) -> None:
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
def test_all_devices_are_shown_whatever_an_image_says(vendor: Any, hidden: str, shown: str) -> None:
    found = steering.environment({hidden, shown}, vendor, {shown: "0"})
    assert (found[hidden], found[shown]) == (None, "all")


def test_the_user_of_the_container_has_no_account_and_only_root_comes_to_its_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (spec,) = run(make_plan(out), out).specs
    assert stat.S_IMODE(out.stat().st_mode) == 0o700
    number = int((spec.user or "").partition(":")[0])
    assert (out / "run").stat().st_uid == number
    if os.geteuid() == 0:
        with pytest.raises(KeyError):
            pwd.getpwuid(number)


def test_suites_and_trainers_are_mounted_beside_each_other(tmp_path: Path) -> None:
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    targets = {mount.target: mount.source for mount in spec.mounts}
    assert (targets["/stackcheck/tests"] / "pytest.ini").exists()
    assert targets["/stackcheck/trainers"].is_dir()


def test_an_unchanged_plan_may_keep_its_result(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    assert suite.earlier_result(plan, tmp_path) is None
    run(plan, tmp_path)
    assert suite.earlier_result(make_plan(tmp_path), tmp_path) is not None


def test_another_tier_may_not_keep_the_result(tmp_path: Path) -> None:
    run(make_plan(tmp_path), tmp_path)
    assert suite.earlier_result(make_plan(tmp_path, tier="standard"), tmp_path) is None


def test_a_run_that_dies_takes_the_earlier_result_along(tmp_path: Path) -> None:
    run(make_plan(tmp_path), tmp_path)
    with pytest.raises(ChecksFailedError):
        run(make_plan(tmp_path), tmp_path, answer=lambda _told: None)
    assert suite.earlier_result(make_plan(tmp_path), tmp_path) is None


def test_a_container_without_a_result_fails_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ChecksFailedError, match="without a result") as caught:
        run(make_plan(tmp_path), tmp_path, answer=lambda _told: None)
    assert "last words" in str(caught.value)


def test_the_log_lies_where_the_container_cannot_write(tmp_path: Path) -> None:
    (spec,) = run(make_plan(tmp_path), tmp_path).specs
    (writable,) = [mount.source for mount in spec.mounts if not mount.read_only]
    assert (tmp_path / "container.log").read_text() == "last words\n"
    assert not (tmp_path / "container.log").is_relative_to(writable)


@pytest.mark.parametrize("what", ["link", "dangling", "device", "pipe", "folder"])
def test_a_result_that_is_no_file_of_the_run_is_refused_and_not_read(tmp_path: Path, what: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's own words")

    def plant(_told: dict[str, Any]) -> None:
        path = tmp_path / "run" / "result.json"
        targets = {"link": secret, "dangling": tmp_path / "nothing", "device": Path("/dev/zero")}
        if what == "pipe":
            os.mkfifo(path)
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to(targets[what])
        # What a container did to make stackcheck print a file of the host as the end of its log.
        (tmp_path / "run" / "container.log").symlink_to(secret)

    with pytest.raises(ChecksFailedError) as caught:
        run(make_plan(tmp_path), tmp_path, answer=plant)
    assert "own words" not in str(caught.value)


@pytest.mark.parametrize("code", [2, 3, 4, 5, 126, 127, 134, 137, 139, 143])
@pytest.mark.parametrize("outcome", ["passed", "failed"])
def test_a_container_that_broke_off_is_refused_whatever_it_wrote(
    tmp_path: Path, code: int, outcome: str
) -> None:
    engine: Any = FakeEngine(lambda told: healthy(told).replace('"passed"', f'"{outcome}"'), code)
    plan = make_plan(tmp_path)
    with pytest.raises(ChecksFailedError, match="killed or ended early") as caught:
        suite.run(plan, engine, out=tmp_path, report=lambda _line: None)
    assert f"exit code {code}" in str(caught.value)
    assert ("SIGKILL" in str(caught.value)) == ("dmesg" in str(caught.value)) == (code == 137)
    assert suite.earlier_result(plan, tmp_path) is None


@pytest.mark.parametrize(
    ("outcome", "code", "fits"),
    [
        ("passed", 0, True),
        ("passed", 1, False),
        ("skipped", 0, True),
        ("failed", 1, True),
        ("failed", 0, False),
        ("error", 0, False),
        ("invalid", 1, True),
        ("invalid", 0, False),
    ],
)
def test_an_exit_code_that_contradicts_the_outcomes_is_refused(
    tmp_path: Path, outcome: str, code: int, *, fits: bool
) -> None:
    engine: Any = FakeEngine(lambda told: healthy(told).replace('"passed"', f'"{outcome}"'), code)
    expectation = (
        contextlib.nullcontext() if fits else pytest.raises(ChecksFailedError, match="contradicts its result")
    )
    with expectation:
        suite.run(make_plan(tmp_path), engine, out=tmp_path, report=lambda _line: None)


@pytest.mark.parametrize(
    "reported", [None, {"path": "/evil/python3"}, {"sha256": result_files.DIGEST}, {"package": None}]
)
def test_a_result_of_another_python_is_refused(tmp_path: Path, reported: dict[str, Any] | None) -> None:
    def other(told: dict[str, Any]) -> str:
        return json.dumps(of_run(told, interpreter=reported and told["interpreter"] | reported))

    with pytest.raises(ChecksFailedError, match="another Python"):
        run(make_plan(tmp_path), tmp_path, answer=other)


def test_a_result_that_names_no_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChecksFailedError, match="which devices the suites saw"):
        run(make_plan(tmp_path), tmp_path, lambda told: json.dumps(of_run(told, seen_devices=None)))


def test_the_result_of_another_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChecksFailedError, match="belongs to a different run"):
        run(make_plan(tmp_path), tmp_path, answer=lambda told: healthy(told | {"run_id": "deadbeef"}))


def test_a_result_that_never_finished_is_not_kept(tmp_path: Path) -> None:
    def dying(told: dict[str, Any]) -> str:
        return json.dumps(of_run(told, checks=[], state="running", finished=None))

    plan = make_plan(tmp_path)
    run(plan, tmp_path, answer=dying)
    assert suite.earlier_result(plan, tmp_path) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tier", "soak"),
        ("stack_id", "another"),
        ("host", result_files.host("nvidia", *["H200"] * 8, driver="580.1")),
        ("inputs", dict.fromkeys(("suites", "trainers", "thresholds", "matrix"), result_files.DIGEST)),
        ("image", {"reference": "x:1", "config_digest": result_files.DIGEST, "manifest_digest": None}),
    ],
)
def test_a_result_about_something_else_than_the_run_is_refused(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ChecksFailedError, match=r"in result\.json differs from run\.json"):
        run(make_plan(tmp_path), tmp_path, answer=lambda told: json.dumps(of_run(told, **{name: value})))


def test_a_result_that_was_edited_is_not_kept(tmp_path: Path) -> None:
    plan, path = make_plan(tmp_path), tmp_path / "run" / "result.json"
    run(plan, tmp_path, answer=lambda told: healthy(told).replace('"passed"', '"failed"'))
    path.write_text(path.read_text().replace('"failed"', '"passed"'))
    assert suite.earlier_result(plan, tmp_path) is None


def keep_as_of(out: Path, started: dt.datetime, finished: dt.datetime) -> None:
    """Shift the times in the files that a run left."""
    result, key = out / "run" / "result.json", out / "key.json"
    times = {"started": started.isoformat(), "finished": finished.isoformat()}
    result.write_text(json.dumps(json.loads(result.read_text()) | times))
    digest = {"result": sha256(result.read_bytes())}
    key.write_text(json.dumps(json.loads(key.read_text()) | digest))


@pytest.mark.parametrize(("days", "kept"), [(6, True), (8, False)])
def test_a_result_is_kept_for_a_week(tmp_path: Path, days: int, *, kept: bool) -> None:
    plan = make_plan(tmp_path)
    run(plan, tmp_path)
    then = dt.datetime.now(dt.UTC) - dt.timedelta(days=days)
    keep_as_of(tmp_path, then, then)
    assert (suite.earlier_result(plan, tmp_path) is not None) == kept


@pytest.mark.parametrize(("started", "finished"), [(-1, 1), (1, 1), (1, -1)])
def test_a_result_from_the_future_is_not_kept(tmp_path: Path, started: int, finished: int) -> None:
    plan, now = make_plan(tmp_path), dt.datetime.now(dt.UTC)
    run(plan, tmp_path)
    keep_as_of(tmp_path, now + started * HOUR, now + finished * HOUR)
    assert suite.earlier_result(plan, tmp_path) is None


@pytest.mark.parametrize(
    ("started", "finished"),
    [(-HOUR, -HOUR), (-HOUR, NONE), (NONE, HOUR), (HOUR, HOUR), (HOUR, NONE), (HOUR, None), (NONE, -HOUR)],
)
def test_times_that_the_image_made_up_are_refused(
    tmp_path: Path, started: dt.timedelta, finished: dt.timedelta | None
) -> None:
    def lying(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC)
        ended = None if finished is None else (now + finished).isoformat()
        state = "finished" if ended else "running"
        return json.dumps(of_run(told, started=(now + started).isoformat(), finished=ended, state=state))

    plan = make_plan(tmp_path)
    with pytest.raises(ChecksFailedError, match="lie outside the run"):
        run(plan, tmp_path, answer=lying)
    assert suite.earlier_result(plan, tmp_path) is None


def test_times_in_whole_milliseconds_are_those_of_the_run(tmp_path: Path) -> None:
    def writing(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        return json.dumps(of_run(told, started=now, finished=now))

    plan = make_plan(tmp_path)
    run(plan, tmp_path, answer=writing)
    assert suite.earlier_result(plan, tmp_path) is not None


def of_vendor(plan: suite.RunPlan, vendor: str) -> suite.RunPlan:
    return dataclasses.replace(plan, host=dataclasses.replace(plan.host, vendor=vendor))


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_runs_on_one_host_see_each_other_s_devices_and_may_pin_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    monkeypatch.setattr(device_leases, "FOLDER", tmp_path / "leases")
    (tmp_path / "dev").mkdir()
    for module, node in ((amd, "kfd"), (nvidia, "nvidia0")):
        monkeypatch.setattr(module, "DEV", tmp_path / "dev")
        (tmp_path / "dev" / node).symlink_to("/dev/null")
    for name in ("one", "two"):
        (spec,) = run(of_vendor(make_plan(tmp_path / name), vendor), tmp_path / name).specs
        (leases,) = [mount for mount in spec.mounts if mount.source == tmp_path / "leases"]
        assert not leases.read_only
        assert f"--lease-dir={leases.target}" in spec.command
        assert spec.ulimits == {"memlock": -1}
    assert stat.S_IMODE((tmp_path / "leases").stat().st_mode) == 0o1777


def test_the_lease_folder_is_looked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_leases, "FOLDER", tmp_path / "leases")
    with mock.patch.object(device_leases, "mounts", wraps=device_leases.mounts) as asked:
        run(of_vendor(make_plan(tmp_path), "amd"), tmp_path)
    asked.assert_called_once()


@pytest.mark.parametrize("vendor", ["amd", "nvidia"])
def test_a_host_without_devices_asks_for_no_limit_that_its_daemon_may_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    monkeypatch.setattr(device_leases, "FOLDER", tmp_path / "leases")
    monkeypatch.setattr(nvidia, "CDI_SPECS", ())  # this machine may have one
    for module in (amd, nvidia):
        monkeypatch.setattr(module, "DEV", tmp_path / "dev")
    (spec,) = run(of_vendor(make_plan(tmp_path), vendor), tmp_path).specs
    assert spec.ulimits == {}


def test_the_bare_machine_and_the_containers_share_one_lease_folder() -> None:
    source = ROOT / "tests" / "acceptance" / "harness" / "leases.py"
    assert f'Path("{device_leases.FOLDER}")' in source.read_text()


def test_a_link_in_the_place_of_the_lease_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leases").symlink_to("/etc")
    monkeypatch.setattr(device_leases, "FOLDER", tmp_path / "leases")
    with pytest.raises(ConfigurationError, match="not a directory"):
        run(of_vendor(make_plan(tmp_path), "amd"), tmp_path)


def test_a_folder_without_permissions_in_the_run_folder_is_removed() -> None:
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
