"""The files with which a scheduler calls `stackcheck gate`: Slurm, Kubernetes, systemd.

In: which of them, and the gate's options. Out: an `Installation`. Nothing is started here. Only --drain lets
a file take a node out of service: Slurm drains a node by itself when a prolog fails, so without it none does.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from stackcheck import vendors
from stackcheck.engine import launch_lines
from stackcheck.errors import ConfigurationError
from stackcheck.nightly.install import Installation, render, require_plain
from stackcheck.suite import run, steering
from stackcheck.vendors import Vendor

Kind = Literal["slurm", "health", "kubernetes", "npd", "systemd"]
UNIT = "stackcheck-gate"
# slurmd kills a health program after 60 s (HealthCheckProgram in slurm.conf).
HEALTH_S = 55
HEALTH_WITHIN_S = 50  # to start Python, and to write the answer
CHECKOUT = "/stackcheck"


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
    text = render("gate-prolog.sh", wanted=wanted, line=" ".join((*wanted.words, "--json")))
    steps = (
        "chmod 755 {path}",
        "in slurm.conf: Prolog={path}, PrologFlags=Alloc, SchedulerParameters=nohold_on_prolog_fail",
        "scontrol reconfigure (without nohold_on_prolog_fail Slurm holds the job that met a refused node)",
    )
    return {"/etc/slurm/prolog.d/stackcheck-gate.sh": text}, steps


def _health(wanted: GateSettings) -> Made:
    line = " ".join(("timeout", str(HEALTH_S), *wanted.words, "--within", str(HEALTH_WITHIN_S), "--json"))
    steps = (
        "chmod 755 {path}",
        "in slurm.conf: HealthCheckProgram={path}, HealthCheckInterval=3600, HealthCheckNodeState=IDLE",
    )
    return {"/etc/slurm/stackcheck-health.sh": render("gate-health.sh", wanted=wanted, line=line)}, steps


def _npd(wanted: GateSettings) -> Made:
    folder = "/etc/node-problem-detector"
    script = f"{folder}/stackcheck-gate.sh"
    files = {
        f"{folder}/stackcheck-gate.json": render("gate-monitor.json"),
        script: render("gate-plugin.sh", line=" ".join((*wanted.words, "--form", "npd"))),
    }
    return files, (f"chmod 755 {script}", "node-problem-detector --config.custom-plugin-monitor={path}")


def _systemd(wanted: GateSettings) -> Made:
    line = " ".join((*wanted.words, "--json"))
    names = (f"{UNIT}.timer", f"{UNIT}.service")
    files = {f"/etc/systemd/system/{name}": render(name, wanted=wanted, line=line) for name in names}
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
    words, user = vendors.module(wanted.vendor).launch_words(), steering.uid()
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
