"""Nodes with MI300X whose nights a test plays: sysfs, modinfo, the clock and the suites' results are made.

In: what happens when. Out: what the real code makes of it: fingerprint, plan, verdict, history, certificate.
"""

import datetime as dt
import functools
import json
import os
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

import asked
import result_files
from small_checkout import CHECKS, FakeEngine
from small_images import make_image
from stackcheck import flow
from stackcheck.certificate import keys
from stackcheck.certificate.verify import Verified
from stackcheck.history.history import open_history
from stackcheck.imaging.image import describe
from stackcheck.matrix import matrix, resolve
from stackcheck.matrix.stack import Stack
from stackcheck.nightly import night, summary
from stackcheck.nightly.planning import NightSettings
from stackcheck.nightly.state import Plan
from stackcheck.suite import subject as subjects
from stackcheck.vendors import amd, kernel_module

# The modules whose clock is the test's.
TIMED = (
    "stackcheck.suite.run", "stackcheck.suite.requirements", "stackcheck.certificate.signing",
    "stackcheck.certificate.policy", "stackcheck.certificate.attachments", "stackcheck.oci.tags",
)  # fmt: skip
MODEL = "MI300X"
GPU_NODE = """simd_count 1216
gfx_target_version 90402
device_id 29857
drm_render_minor {minor}
unique_id {unique}
"""
CARD = {
    "mem_info_vram_total": str(192 * 2**30),
    "vbios_version": "113-M3000100-103",
    "current_compute_partition": "SPX",
    "current_memory_partition": "NPS1",
    "hwmon/hwmon3/power1_cap": "750000000",
}
MODINFO = """#!/bin/sh
exec cat "$MODINFO_ANSWER"
"""

# What the suites find: the image's manifest digest, the driver, the run of this night from 1 -> the outcomes
# that are not `passed`.
Finds = Callable[[str, str, int], dict[str, str]]


def _no_toolkit(folder: Path) -> None:
    """The tool's own pytest, of a thousand files, which no made run needs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launcher.py").write_text("# launches\n")


class Clock:
    """The time of the test, for every module that asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, start: dt.datetime) -> None:
        self.now = start
        clock = self

        class Datetime(dt.datetime):
            @classmethod
            def now(cls, tz: dt.tzinfo | None = None) -> dt.datetime:  # noqa: ARG003
                clock.now += dt.timedelta(milliseconds=7)
                return clock.now

        fake = types.SimpleNamespace(**{**vars(dt), "datetime": Datetime})
        for name in TIMED:
            monkeypatch.setattr(f"{name}.dt", fake)

    def __call__(self) -> dt.datetime:
        self.now += dt.timedelta(milliseconds=7)
        return self.now


class Node:
    """One machine: its sysfs, its installed module, its checkout, its engine."""

    def __init__(self, name: str, folder: Path, root: Path, *, gpus: int = 8, first_id: int = 1) -> None:
        self.name = name
        self.sys = folder / f"sys-{name}"
        self.modinfo = folder / f"modinfo-{name}"
        self.root = root
        self.engine = FakeEngine()
        self._make(gpus, first_id)
        self.install("6.14.5", "AAAA")
        self.reboot()

    def install(self, version: str, srcversion: str) -> None:
        """A package brings another module; the kernel goes on with the old one."""
        self.modinfo.write_text(
            f"filename: /lib/x.ko\nversion:        {version}\nsrcversion:     {srcversion}\n"
        )

    def reboot(self) -> None:
        """The kernel runs what is installed."""
        fields = dict(line.split(":") for line in self.modinfo.read_text().splitlines())
        for name in ("version", "srcversion"):
            (self.sys / "module/amdgpu" / name).write_text(fields[name].strip() + "\n")

    def flash(self, firmware: str) -> None:
        """New firmware on every device."""
        for path in self.sys.glob("class/drm/*/device/vbios_version"):
            path.write_text(firmware + "\n")

    def _make(self, gpus: int, first_id: int) -> None:
        (self.sys / "module/amdgpu").mkdir(parents=True)
        for index in range(gpus):
            node = self.sys / f"class/kfd/kfd/topology/nodes/{index}"
            node.mkdir(parents=True)
            text = GPU_NODE.format(minor=128 + index, unique=first_id + index)
            (node / "properties").write_text(text)
            card = self.sys / f"class/drm/renderD{128 + index}/device"
            (card / "hwmon/hwmon3").mkdir(parents=True)
            for name, value in CARD.items():
                (card / name).write_text(value + "\n")


class Nights:
    """Nodes that share a publish target, night after night."""

    def __init__(self, folder: Path, root: Path, monkeypatch: pytest.MonkeyPatch, real_amd: Any) -> None:
        self.folder = folder
        self.patch = monkeypatch
        self.clock = Clock(monkeypatch, dt.datetime(2026, 11, 1, 2, tzinfo=dt.UTC))
        self.target = f"oci:{folder / 'dist'}"
        self.key = folder / "stackcheck.key"
        self.finds: Finds = lambda _stack, _driver, _run: {}
        self.runs: dict[str, int] = {}
        self.lines: list[str] = []
        for name, function in real_amd.items():
            monkeypatch.setattr(amd, name, function)
        # The suites are made, so their program that knows the bounds is too: it knows none.
        nothing = json.dumps({"reached": [], "bounds": [], "missing": [], "unmeasured": []})
        monkeypatch.setattr("stackcheck.suite.bounds.ask_suites", lambda _root, _question: nothing)
        monkeypatch.setattr("stackcheck.suite.inputs.freeze_tools", _no_toolkit)
        # The matrix stays as it is, and resolving it for each run would take most of the time.
        known = functools.cache(resolve.load_stacks)
        same = types.SimpleNamespace(usable=lambda _root: known(self.root))
        monkeypatch.setattr("stackcheck.nightly.act.resolve", same)
        tools = folder / "tools"
        tools.mkdir()
        (tools / "modinfo").write_text(MODINFO)
        (tools / "modinfo").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
        self.root = root

    def node(self, name: str, *, revoke: str = "auto", **options: Any) -> Node:
        """One more machine, with a copy of the checkout; `revoke` as in its matrix.yaml."""
        root = self.folder / f"checkout-{name}"
        shutil.copytree(self.root, root, symlinks=True)
        matrix_file = root / "matrix.yaml"
        text = matrix_file.read_text().replace("\npolicy:\n", f"\npolicy:\n  revoke: {revoke}\n", 1)
        matrix_file.write_text(text)
        made = Node(name, self.folder, root, **options)
        made.engine.answer = self._answer
        return made

    def on(self, node: Node) -> None:
        """The code runs on this node now."""
        self.patch.setattr(amd, "SYS", node.sys)
        self.patch.setattr(kernel_module, "SYS_MODULES", node.sys / "module")
        self.patch.setenv("MODINFO_ANSWER", str(node.modinfo))

    def publish(self, node: Node, stack: Stack, content: str) -> str:
        """Test, certify and publish an image of a stack on a node; its digest."""
        self.on(node)
        self.runs.clear()
        settings, engine = self.flow(node), cast("Any", node.engine)
        folder = settings.folder(stack.id) / "oci"
        shutil.rmtree(folder, ignore_errors=True)
        make_image(folder, content.encode())
        name = f"stackcheck/{stack.id}:{content}".lower()
        node.engine.load(folder, name)
        image = describe(
            folder, sizes=(1, 1), stack_id=stack.id, reference=name, seconds=1, key="", inputs={}
        )
        subject = subjects.of_stack(stack, image, matrix.load_matrix(node.root / "matrix.yaml").policy)
        judged = flow.test(subject, engine, settings, self.lines.append)
        envelopes = flow.sign(subject, judged, settings)
        return flow.publish_signed(image, stack.id, envelopes, settings, self.lines.append).digest

    def play(self, node: Node, **options: Any) -> Plan:
        """One night on a node."""
        self.on(node)
        self.runs.clear()
        settings = self.settings(node, **options)
        engine: Any = node.engine
        plan = night.begin(settings, engine, self.lines.append)
        plan = night.play(plan, settings, engine, open_history(node.root), self.lines.append)
        summary.deliver(plan, night.folder_of(node.root))
        night.finish(plan, settings)
        return plan

    def verify(self, stack: Stack, driver: str) -> Verified:
        """What a user of a node with this driver gets now."""
        return asked.verified(
            f"{self.target}:{stack.id}",
            public_key=keys.load_or_create(self.key).public_key(),
            device_model=MODEL,
            driver=driver,
            devices=8,
            now=self.clock(),
        )

    def flow(self, node: Node) -> flow.FlowSettings:
        return flow.FlowSettings(root=node.root, target=self.target, key=self.key)

    def settings(self, node: Node, **options: Any) -> NightSettings:
        key = keys.load_or_create(self.key)
        return NightSettings(flow=self.flow(node), key=key, clock=self.clock, **options)

    def _answer(self, told: dict[str, Any]) -> str:
        name = told["image"]["manifest_digest"]
        self.runs[name] = self.runs.get(name, 0) + 1
        found = self.finds(name, told["host"]["driver"], self.runs[name])
        checks = [result_files.check(check, found.get(check, "passed"), devices=[]) for check in CHECKS]
        started = self.clock().isoformat()
        self.clock.now += dt.timedelta(minutes=4)
        same = result_files.told_again(told)
        result = result_files.result(*checks, **same, started=started, finished=self.clock().isoformat())
        return json.dumps(result)
