"""The files with which a scheduler calls `stackcheck gate`: Slurm, Kubernetes, systemd.

In: which of them, and the gate's options. Out: an `Installation`. Nothing is started here. Only --drain lets
a file take a node out of service: Slurm drains a node by itself when a prolog fails, so without it none does.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.errors import ConfigurationError
from stackcheck.nightly.install import Installation, require_plain
from stackcheck.suite import container_user, run
from stackcheck.vendors import Vendor

Kind = Literal["slurm", "health", "kubernetes", "npd", "systemd"]
UNIT = "stackcheck-gate"
UNFIT, FAILED = 9, 6  # exit codes of `stackcheck gate`
CONDITION, FIT, REFUSED = "NodeUnfitForTraining", "GateFit", "GateUnfit"
# slurmd kills a health program after 60 s (HealthCheckProgram in slurm.conf).
HEALTH_S = 55
HEALTH_WITHIN_S = 50  # to start Python, and to write the answer
CHECKOUT = "/stackcheck"

PROLOG = """\
#!/bin/sh
# Slurm's {use}. {says}
PATH=/usr/sbin:/usr/bin:/sbin:/bin:$PATH
said=$({line} 2>>{log})
code=$?
echo "$said" >>{log}
{end}
"""
PLUGIN = """\
#!/bin/sh
# A plug-in of node-problem-detector: 0 fit, 1 not fit, 2 not known; one line.
exec {line} 2>/dev/null
"""
SERVICE = """\
# Whether this node is fit for training. Exit code 9: a part of it is not (docs/guides/gate.md).
[Unit]
Description=Is this node fit for training?
Documentation=file://{root}/docs/guides/gate.md
After=docker.service

[Service]
Type=oneshot
WorkingDirectory={root}
ExecStart={line}
TimeoutStartSec=10min
"""
TIMER = """\
# Each hour, at another minute on each node.
[Unit]
Description=Ask each hour whether this node is fit for training

[Timer]
OnCalendar=hourly
RandomizedDelaySec=30min
FixedRandomDelay=true
Unit={unit}.service

[Install]
WantedBy=timers.target
"""


@dataclass(frozen=True, kw_only=True)
class GateSettings:
    """What the files say: the checkout on the nodes, and the options of `stackcheck gate`."""

    root: Path
    image: str | None = None
    vendor: Vendor | None = None
    python: str = sys.executable
    state: Path | None = None
    drain: Literal["slurm", "kubernetes"] | None = None
    program: str = str(Path(sys.executable).parent / "stackcheck")
    log: str = "/var/log/stackcheck-gate.log"

    @property
    def words(self) -> tuple[str, ...]:
        """The command line."""
        return (
            *(self.program, "gate", *((self.image,) if self.image else ())),
            *(("--gpu-vendor", self.vendor) if self.vendor else ()),
            *(() if self.image else ("--python", self.python)),
            *(("--state", str(self.state)) if self.state else ()),
            *(("--drain", self.drain) if self.drain else ()),
            *("--root", str(self.root)),
        )


def installation(kind: Kind, wanted: GateSettings, folder: Path | None = None) -> Installation:
    """The files of one kind; `folder` takes them instead of their usual places. Pure."""
    require_plain({f"option {word}": word for word in wanted.words})
    files, steps = _MAKERS[kind](wanted)
    placed = {(folder / Path(path).name if folder else Path(path)): text for path, text in files.items()}
    return Installation(
        files=placed, next_steps=tuple(step.format(path=next(iter(placed))) for step in steps)
    )


Made = tuple[dict[str, str], tuple[str, ...]]


def _slurm(wanted: GateSettings) -> Made:
    if wanted.drain:
        says = "A node with a broken part is drained with the reason, and the job goes to another one."
        end = (
            "case $said in *'\"drains\": true'*) exit 1 ;; esac\n"
            "exit 0 # neither a check of a faulty image nor a GPU in use by another job drains a node"
        )
    else:
        says = "It only writes the log: Slurm drains a node whose prolog fails (--drain slurm)."
        end = (
            f"if [ $code -eq {UNFIT} ] || [ $code -eq {FAILED} ]; then\n"
            '  logger -t stackcheck-gate "not fit: code $code" || :\nfi\nexit 0'
        )
    text = PROLOG.format(
        use="Prolog", says=says, line=" ".join((*wanted.words, "--json")), end=end, log=wanted.log
    )
    steps = (
        "chmod 755 {path}",
        "in slurm.conf: Prolog={path}, PrologFlags=Alloc, SchedulerParameters=nohold_on_prolog_fail",
        "scontrol reconfigure (without nohold_on_prolog_fail Slurm holds the job that met a refused node)",
    )
    return {"/etc/slurm/prolog.d/stackcheck-gate.sh": text}, steps


def _health(wanted: GateSettings) -> Made:
    line = " ".join(("timeout", str(HEALTH_S), *wanted.words, "--within", str(HEALTH_WITHIN_S), "--json"))
    only = "" if wanted.drain else ": it only writes the log"
    says = f"Slurm kills it after 60 s, and ignores its exit code{only}."
    text = PROLOG.format(use="HealthCheckProgram", says=says, line=line, end="exit $code", log=wanted.log)
    steps = (
        "chmod 755 {path}",
        "in slurm.conf: HealthCheckProgram={path}, HealthCheckInterval=3600, HealthCheckNodeState=IDLE",
    )
    return {"/etc/slurm/stackcheck-health.sh": text}, steps


def _npd(wanted: GateSettings) -> Made:
    script = "/etc/node-problem-detector/stackcheck-gate.sh"
    line = " ".join((*wanted.words, "--form", "npd"))
    rule = {"type": "permanent", "condition": CONDITION, "reason": REFUSED, "path": script, "timeout": "150s"}
    monitor = {
        "plugin": "custom",
        "pluginConfig": {
            "invoke_interval": "1h",
            "timeout": "150s",
            "max_output_length": 80,
            "concurrency": 1,
            "enable_message_change_based_condition_update": True,
        },
        "source": UNIT,
        "metricsReporting": True,
        "conditions": [{"type": CONDITION, "reason": FIT, "message": "the node is fit"}],
        "rules": [rule],
    }
    files = {
        "/etc/node-problem-detector/stackcheck-gate.json": json.dumps(monitor, indent=2) + "\n",
        script: PLUGIN.format(line=line),
    }
    return files, (f"chmod 755 {script}", "node-problem-detector --config.custom-plugin-monitor={path}")


def _systemd(wanted: GateSettings) -> Made:
    folder = "/etc/systemd/system"
    line = " ".join((*wanted.words, "--json"))
    files = {
        f"{folder}/{UNIT}.timer": TIMER.format(unit=UNIT),
        f"{folder}/{UNIT}.service": SERVICE.format(root=wanted.root, line=line),
    }
    return files, (
        "systemctl daemon-reload",
        f"systemctl enable --now {UNIT}.timer",
        f"systemctl start {UNIT}",
    )


def _kubernetes(wanted: GateSettings) -> Made:
    """A pod whose init container runs the suites in the job's own image: a refused node starts no job.

    No program of stackcheck runs in that image, so pytest alone judges, and nothing is compared with earlier.
    """
    if not wanted.image or not wanted.vendor:
        raise ConfigurationError(
            "an init container needs the image of the job, and its vendor",
            where="--install kubernetes",
            got=f"image {wanted.image or 'none'}, vendor {wanted.vendor or 'none'}",
            expected="HOST/REPO@sha256:… --gpu-vendor amd or nvidia",
            next_step="stackcheck gate HOST/REPO@sha256:… --gpu-vendor nvidia --install kubernetes --dry-run",
        )
    words, user = vendors.module(wanted.vendor).launch_words(), container_user.uid()
    limits: Mapping[str, int] = {words.resource: 8} if words.resource else {}
    job = {"name": "job", "image": wanted.image, "command": ["python3", "-c", "print('the job')"]}
    pod = launch_lines.pod(
        job | {"resources": {"limits": limits}},
        [{"name": "checkout", "mountPath": CHECKOUT, "readOnly": True}],
        {"name": "checkout", "hostPath": {"path": str(wanted.root), "type": "Directory"}},
        shm=str(run.SHM_SIZE_BYTES[wanted.vendor]),
        capabilities={"drop": ["ALL"]},
        securityContext={"runAsUser": user, "runAsGroup": user, "runAsNonRoot": True},
    )
    own = pod["containers"][0]
    pod["initContainers"] = [own | {"name": "gate", "command": _suites(wanted.vendor), "workingDir": "/tmp"}]  # noqa: S108  # the container's own
    document: dict[str, Any] = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": UNIT}, "spec": pod}
    head = "# Copy initContainers and its volumes into your job's pod; the count of devices is a node's.\n"
    text = head + yaml.safe_dump(document, sort_keys=False, width=110)
    return {f"{wanted.root}/build/gate/{UNIT}.yaml": text}, ("kubectl apply -f {path}",)


def _suites(vendor: Vendor) -> list[str]:
    return [
        *("python3", "-B", "-m", "pytest", f"{CHECKOUT}/tests", "-p", "no:cacheprovider"),
        *(f"--gpu-vendor={vendor}", "--tier=gate", "--result-dir=gate"),
    ]


_MAKERS = {"slurm": _slurm, "health": _health, "kubernetes": _kubernetes, "npd": _npd, "systemd": _systemd}
