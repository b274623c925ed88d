"""A real Slurm cluster on one host: munged, slurmctld and some slurmd, each of which is a node of its own.

In: a folder. Out: a running cluster, and the environment in which its clients find it. Everything that it
starts it ends by process id.
"""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from waits import run_program

NODES = ("node1", "node2", "node3", "node4")
TIMEOUT_S = 300.0  # only for what hangs: a busy machine may take minutes
CONF = """\
ClusterName=small
SlurmctldHost=localhost
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SlurmctldPort={control}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,nohold_on_prolog_fail
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
# A node that dies is seen soon, but not one that is only slow because the machine is busy. Messages go to
# every node directly: none waits for a dead one. KillWait is Slurm's own default.
SlurmdTimeout=60
KillWait=30
MessageTimeout=30
TreeWidth=65533
UnkillableStepTimeout=120
TopologyPlugin=topology/tree
{nodes}
{more}
PartitionName=small Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
TOPOLOGY = """\
SwitchName=rack1 Nodes=node[1-2]
SwitchName=rack2 Nodes=node[3-4]
SwitchName=spine Switches=rack[1-2]
"""


class Cluster:
    """A cluster of four nodes."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder, self.more = folder, more
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def configure(self) -> None:
        control, *ports = _free_ports(len(NODES) + 1)
        lines = [
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000"
            for name, port in zip(NODES, ports, strict=True)
        ]
        text = CONF.format(folder=self.folder, control=control, nodes="\n".join(lines), more=self.more)
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "topology.conf").write_text(TOPOLOGY)
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)

    def start(self) -> None:
        munge = [f"--{name}-file={self.folder}/munge.{name}" for name in ("key", "log", "pid", "seed")]
        self._daemon(
            "munged", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.sock", *munge
        )
        wait((self.folder / "munge.sock").is_socket, "munged")
        self._daemon("slurmctld", "slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        for name in NODES:
            self.start_node(name)
        self.wait_for("idle", *NODES)

    def start_node(self, name: str) -> None:
        self._daemon(name, "slurmd", "-D", "-N", name, "-f", self.env["SLURM_CONF"])

    def _daemon(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as log:
            # Without an end of its own a daemon would get the signals of this terminal.
            self.daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.env, start_new_session=True
            )

    def client(self, *command: str) -> str:
        done = run_program(command, env=self.env, timeout=TIMEOUT_S)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def jobs(self, *options: str) -> str:
        """The jobs that have not ended. No list of their states: a job that gets a signal is not RUNNING."""
        return self.client("squeue", "--noheader", *options)

    def states(self) -> dict[str, str]:
        done = run_program(["sinfo", "--noheader", "--Node", "--format=%N %T"], env=self.env)
        return dict(line.split() for line in done.stdout.splitlines())

    def wait_for(self, state: str, *names: str) -> None:
        wait(lambda: all(self.states().get(name) == state for name in names), f"{names} {state}", self)

    def pause_node(self, name: str) -> None:
        """The node is there for Slurm, and starts nothing."""
        self.daemons[name].send_signal(signal.SIGSTOP)

    def resume_node(self, name: str) -> None:
        self.daemons[name].send_signal(signal.SIGCONT)

    def kill_node(self, name: str, job: Path) -> None:
        """The power of a node goes: its daemon and everything that it started end at once."""
        daemon = self.daemons.pop(name)
        daemon.kill()
        daemon.wait(TIMEOUT_S)
        processes = self._of_node(name, job)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait(lambda: not any(map(_lives, processes)), f"the end of what ran on {name}")

    def end_time_of(self, name: str, job: Path) -> None:
        """The clock of a node's run rings now."""
        for process in self._of_node(name, job):
            if "stackcheck.fleet.node" in process.cmdline():
                process.send_signal(signal.SIGALRM)

    def _of_node(self, name: str, job: Path) -> list[psutil.Process]:
        """The tasks of a node; slurmstepd has left its daemon's process group."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                variables = process.environ()
                if variables.get("SLURMD_NODENAME") == name and str(job) in " ".join(process.cmdline()):
                    found += [process, *(each for each in process.parents() if each.name() == "slurmstepd")]
        return found

    def stop(self) -> None:
        for name, daemon in reversed(self.daemons.items()):
            daemon.send_signal(signal.SIGCONT)
            daemon.terminate()
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait(TIMEOUT_S)
            del name
        for process in psutil.process_iter():  # steps that outlived their node
            with contextlib.suppress(psutil.Error):
                if process.name() == "slurmstepd" and self._is_ours(process):
                    process.kill()

    def _is_ours(self, process: psutil.Process) -> bool:
        # slurmstepd writes its title over the first variables, so that psutil reads none.
        with contextlib.suppress(OSError):
            return self.env["SLURM_CONF"].encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
        return False

    def logs(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted(self.folder.glob("*.*o[gu]*"))
        )


@contextlib.contextmanager
def running(more: str = "") -> Iterator[Cluster]:
    """A started cluster, with `more` lines of slurm.conf; in /tmp, as a socket's path has to be short."""
    folder = Path(tempfile.mkdtemp(prefix="stackcheck-slurm-", dir="/tmp"))
    folder.chmod(0o755)
    cluster = Cluster(folder, more)
    try:
        cluster.configure()
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def wait(holds: object, what: str, cluster: Cluster | None = None) -> None:
    assert callable(holds)
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end, (
            f"{what}: not within {TIMEOUT_S:g} s\n{cluster.logs() if cluster else ''}"
        )
        time.sleep(0.2)
