"""A checkout whose images are a few kilobytes, an engine that only writes files, the command line in-process.

The matrix, the stacks, building, judging, signing, publishing and verifying are the real ones.
"""

import dataclasses
import datetime as dt
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import result_files
from fake_files import STATUS, HasFiles
from small_images import make_image
from stackcheck import cli, vendors
from stackcheck.engine.buildx import BakeResult
from stackcheck.engine.client import RunSpec
from stackcheck.imaging import bootstrap
from stackcheck.imaging.wheels import host_settings, wheel_cache
from stackcheck.oci.documents import is_digest
from stackcheck.oci.layout import OciLayout
from stackcheck.recipe.upstream import Upstream
from stackcheck.suite import inputs, needed, sbom
from stackcheck.vendors import amd, nvidia

ROOT = Path(__file__).resolve().parents[3]
CPU_STACK = "cpu-torch2.13.0-py3.11-debian12"
AMD_STACK = "rocm5.7-debian13"
FOREIGN = "registry.example.org/team/image:1"


ROWS = """amd-container:
  title: AMD
  defaults: {count: 8}
  jobs: {}
  rows:
    - {id: a, device: MI300X, metric: tflops_noncausal, unit: TFLOP/s/GPU, value: 426.79}
"""


def answer(*changes: tuple[str, str], required: Sequence[str] = ()) -> Callable[[dict[str, Any]], str]:
    """What the suites write: every required check passed, except those with an outcome in `changes`."""
    outcomes = dict(changes)

    def write(told: dict[str, Any]) -> str:
        now = dt.datetime.now(dt.UTC).isoformat()
        names = required or CHECKS
        checks = [result_files.check(name, outcomes.get(name, "passed"), devices=[]) for name in names]
        same = result_files.told_again(told)
        return json.dumps(result_files.result(*checks, **same, started=now, finished=now))

    return write


CHECKS = (
    "test_image.py::test_pip_check_finds_no_conflict",
    "test_devices.py::test_device_count",
    "test_kernels.py::test_gemm",
    "test_training.py::test_throughput",
)


def write_checks(root: Path) -> None:
    """The list of the small suites' checks, and the real rows of the devices."""
    real = json.loads((ROOT / "tests" / "acceptance" / "checks.json").read_text(encoding="utf-8"))
    waived = dict.fromkeys((name for names in real.values() for name in names), "soak")
    tiers = waived | dict.fromkeys(CHECKS, "smoke")
    listing = {"every": tiers, "gate": dict.fromkeys(CHECKS, "smoke")} | {
        key: {} for key in ("cpu", *map(str, range(1, 9)))
    }
    (root / "tests" / "acceptance" / "checks.json").write_text(json.dumps(listing))
    shutil.copy(ROOT / "tests" / "acceptance" / "devices.json", root / "tests" / "acceptance")


class FakeEngine(HasFiles):
    """The engine's boundary: a build writes a small layout, a run writes what `answer` gives for run.json."""

    description = "fake 1 (containerd store)"
    repeats_builds = True
    containerd_store = True
    architecture = "amd64"

    def __init__(self) -> None:
        self.answer: Any = answer()
        self.builds: list[Mapping[str, Any]] = []
        self.runs: list[RunSpec] = []
        self.names: set[str] = set()
        self.ids: dict[str, str] = {}
        self.labels: dict[str, str] = {}
        self.env: dict[str, str] = {}
        self.processor = self.architecture  # of every image
        self.not_found: list[str] = []  # of installed packages
        self.python_says = ""  # as it fails to start
        self.inventory: list[dict[str, Any]] = [
            {"kind": "python", "place": "/x/torch.dist-info", "head": "Name: torch\nVersion: 2.13.0+cpu"},
            {"kind": "python", "place": "/x/numpy.dist-info", "head": "Name: numpy\nVersion: 2.4.6"},
            {"kind": "dpkg", "text": STATUS},
            {"kind": "end", "folders": 1, "unread": []},
        ]

    def bake(self, definition: Mapping[str, Any], targets: Sequence[str], **_options: object) -> Any:
        self.builds.append(definition)
        for name in targets:
            target = definition["target"][name]
            output = dict(part.split("=", 1) for part in target["output"][0].split(",") if "=" in part)
            if output["type"] != "oci":
                continue
            make_image(Path(output["dest"]), (Path(target["context"]) / "Dockerfile").read_bytes())
        return BakeResult(steps=2, cached=0, seconds=0.5)

    def load(self, layout: Path, reference: str) -> None:
        self.names.add(reference)
        (config,) = OciLayout(layout).only_manifest().descriptors("config")
        self.ids[reference] = config.digest

    def has(self, reference: str) -> bool:
        return reference in self.names

    def step_sizes(self, _reference: str) -> tuple[int, ...]:
        return (1000, 10)

    def pull(self, reference: str) -> None:
        self.names.add(reference)

    def save(self, reference: str, layout: Path) -> None:
        assert is_digest(reference) or reference in self.names
        shutil.rmtree(layout, ignore_errors=True)
        make_image(layout, reference.encode())

    def inspect(self, reference: str) -> Any:
        made = reference if is_digest(reference) else f"sha256:{reference.encode().hex():0<64.64}"
        name = self.ids.get(reference) or made
        return SimpleNamespace(id=name, labels=self.labels, env=self.env, architecture=self.processor)

    def run(self, spec: RunSpec) -> int:
        if spec.command[-1] == sbom.PROGRAM:  # lists the packages, does not run the suites
            assert spec.on_line
            for record in self.inventory:
                spec.on_line(json.dumps(record))
            return 0
        if needed.ASK in spec.command:  # what the image's Python does not find
            assert spec.on_line
            spec.on_line(self.python_says or json.dumps(self.not_found))
            return 126 if self.python_says else 0
        self.runs.append(spec)
        judge: Any = spec.beside
        if judge is None:  # a program that is no suite
            return 0
        text = self.answer(json.loads(judge.run_file.read_text(encoding="utf-8")))
        if text is not None:
            (judge.folder / "result.json").write_text(text, encoding="utf-8")
        judge.code = result_files.exit_code(text)
        return 137  # the end of the controller ends the container


def without_waivers(matrix: str) -> str:
    """The text of a matrix without its waivers: tests give their own."""
    return re.sub(r"^  waivers:\n(    .*\n)+", "", matrix, flags=re.MULTILINE)


def make_checkout(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout on a host without a GPU."""
    root = folder / "checkout"
    (root / "tests" / "acceptance").mkdir(parents=True)
    (root / "trainers").mkdir()
    (root / "tests" / "acceptance" / "test_some.py").write_text("# checks\n")
    write_checks(root)
    for name in ("conftest.py", "pytest.ini"):
        (root / "tests" / name).write_text("")
    (root / "trainers" / "train.py").write_text("# trains\n")
    research = root / "benchmarks" / "training"
    research.mkdir(parents=True)
    (research / "rows.yaml").write_text(ROWS)
    (root / "matrix.yaml").write_text(without_waivers((ROOT / "matrix.yaml").read_text()))
    shutil.copytree(ROOT / "images", root / "images")
    for module in (amd, nvidia):
        monkeypatch.setattr(module, "devices", tuple)
        monkeypatch.setattr(module, "driver", lambda: None)
        monkeypatch.setattr(module, "present", lambda: False)
    tar = folder / "rootfs.tar"
    tar.write_bytes(b"tar")
    base = bootstrap.RootFs(path=tar, digest=result_files.DIGEST, packages={}, reused=True)
    monkeypatch.setattr(bootstrap, "bootstrap", lambda *_a, **_k: base)
    monkeypatch.setattr(bootstrap, "ready", lambda *_a: ())  # whatever host these tests run on
    empty = host_settings.HostSettings(pip={}, folders=(), indexes=(), ca=None)
    monkeypatch.setattr(host_settings, "host_settings", lambda: empty)
    # No public place: a test would ask this machine's pip where its proxy is, and then the Internet.
    monkeypatch.setattr(Upstream, "answers", lambda *_: "out of reach")
    monkeypatch.setenv(wheel_cache.VARIABLE, wheel_cache.OFF)
    monkeypatch.setattr(inputs, "PACKAGES", ("iniconfig",))  # the whole of it is `test_launcher.py`'s
    assert vendors.detect() == "cpu"
    return root


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def call(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> Done:
    """`stackcheck ARGUMENTS` as the program runs it: exit code, stdout, stderr."""
    capsys.readouterr()
    with (
        mock.patch.object(sys, "argv", ["stackcheck", *map(str, arguments)]),
        mock.patch("stackcheck.cli.signal.signal"),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return Done(int(ended.value.code or 0), captured.out, captured.err)


def verify(
    capsys: pytest.CaptureFixture[str], reference: str = f"oci:dist:{CPU_STACK}", *options: str
) -> Done:
    """`stackcheck verify` for a host without a GPU."""
    return call(capsys, "verify", reference, "--device-model", "CPU", "--driver", "none", *options)
