"""Nodes with addresses and links of their own, in network namespaces of one host.

In: names. Out: a full mesh of nodes, each of which has its own Docker socket: what is started there on the
host's network has the network of that node. Links can be slow, lossy or blackholed, and a node can be lost.
Everything is inside the namespaces, and goes with them. Each link has a rate of its own that a busy
host reaches too: what the processors can carry would change with whatever else runs.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from small_stacks import ROOT
from stackcheck.engine.leftovers import LABEL
from stackcheck.fleet.engines import JobState, NodeFacts
from stackcheck.fleet.job import Job, NodeState, read_state

DAEMON = "/var/run/docker.sock"
FABRIC = "fabric0"  # the device that has a node's address, whatever link its packets take
SLEEP_S = 3600
# Of links in Mbit/s. Far from each other, as of equal speeds a little one is an outlier already.
FIRST_RATE, NEXT_RATE, SLOW_RATE = 800, 200, 100
CREATE = re.compile(rb"POST [^ ]*/containers/create[? ]")
LENGTH = re.compile(rb"(?i)\r\ncontent-length: (\d+)")


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
    return done.stdout


class Network:
    """A full mesh: every two nodes have a link of their own."""

    def __init__(self, names: Sequence[str], image: str, folder: Path) -> None:
        self.names, self.image, self.folder = tuple(names), image, folder
        self.addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self.spaces = {name: f"stackcheck-{os.getpid()}-{name}" for name in names}
        self.sockets: dict[str, DockerOfNode] = {}

    def start(self) -> None:
        for name in self.names:
            self._start_node(name)
        for number, (one, other) in enumerate(itertools.combinations(self.names, 2)):
            place = ("netns", self.spaces[other])
            self.ip(one, "link", "add", f"to-{other}", "type", "veth", "peer", "name", f"to-{one}", *place)
            for here, there in ((one, other), (other, one)):
                self.ip(here, "link", "set", f"to-{there}", "up")
            self._rate(one, other, FIRST_RATE + number * NEXT_RATE)
        for one, other in itertools.permutations(self.names, 2):
            source = ("src", self.addresses[one])
            self.ip(one, "route", "add", f"{self.addresses[other]}/32", "dev", f"to-{other}", *source)

    def _start_node(self, name: str) -> None:
        """A container that sleeps holds the namespace, as an engine makes it for each of its containers."""
        space, address = self.spaces[name], self.addresses[name]
        own = ("--network", "none", "--hostname", name, "--add-host", f"{name}:{address}")
        command(
            *("docker", "run", "--detach", "--name", space, *own, "--dns", "127.0.0.1"),
            *("--entrypoint", "sleep", self.image, str(SLEEP_S)),
        )
        pid = command("docker", "inspect", "--format", "{{.State.Pid}}", space).strip()
        command("ip", "netns", "attach", space, pid)
        self.ip(name, "link", "add", FABRIC, "type", "veth", "peer", "name", "fabric1")
        for device in (FABRIC, "fabric1"):
            self.ip(name, "link", "set", device, "up")
        self.ip(name, "address", "add", f"{address}/32", "dev", FABRIC)
        self.sockets[name] = DockerOfNode(self.folder / f"{name}.sock", space)

    def stop(self) -> None:
        for server in self.sockets.values():
            server.close()
        for space in self.spaces.values():
            for end in (("docker", "rm", "--force", space), ("ip", "netns", "delete", space)):
                subprocess.run(end, capture_output=True, check=False, timeout=300)

    def ip(self, name: str, *words: str) -> str:
        return command("ip", "-netns", self.spaces[name], *words)

    def inside(self, name: str, *words: str) -> str:
        return command("ip", "netns", "exec", self.spaces[name], *words)

    def _rate(self, one: str, other: str, mbit_per_s: int) -> None:
        """A token bucket is in every kernel; netem is not."""
        for here, there in ((one, other), (other, one)):
            bucket = ("root", "tbf", "rate", f"{mbit_per_s}mbit", "burst", "1mb", "latency", "100ms")
            self.inside(here, "tc", "qdisc", "replace", "dev", f"to-{there}", *bucket)

    def slow(self, one: str, other: str) -> None:
        """A cable that came up at a low rate."""
        self._rate(one, other, SLOW_RATE)

    def lossy(self, one: str, other: str) -> None:
        """Every fiftieth packet is lost on its way. A packet is as large as on a cable: of the 64 KiB that
        Linux hands over at once between namespaces a transfer may lose none, and that is as fast as any.
        """
        for here, there in ((one, other), (other, one)):
            self.ip(here, "link", "set", f"to-{there}", "gso_max_segs", "1")
            fiftieth = ("-m", "statistic", "--mode", "random", "--probability", "0.02")
            self.inside(here, "iptables", "-A", "INPUT", "-i", f"to-{there}", *fiftieth, "-j", "DROP")

    def blackhole(self, one: str, other: str) -> None:
        """Every packet is lost, and nobody is told."""
        for here, there in ((one, other), (other, one)):
            self.inside(here, "iptables", "-A", "INPUT", "-i", f"to-{there}", "-j", "DROP")

    def lose(self, name: str) -> None:
        """All links of a node are down."""
        for other in self.names:
            if other != name:
                self.ip(name, "link", "set", f"to-{other}", "down")


class DockerOfNode:
    """A socket of the engine on which the host's network is a node's, as where a node has its own engine."""

    def __init__(self, path: Path, space: str) -> None:
        self.path, self.space = path, space
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(str(path))
        self.server.listen(16)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self.server.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self.server.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            daemon.connect(DAEMON)
            for run, given, taken in ((self._requests, client, daemon), (self._copy, daemon, client)):
                threading.Thread(target=run, args=(given, taken), daemon=True).start()

    @staticmethod
    def _copy(given: socket.socket, taken: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := given.recv(1 << 16):
                taken.sendall(data)
            taken.shutdown(socket.SHUT_WR)

    def _requests(self, client: socket.socket, daemon: socket.socket) -> None:
        """A client waits for each answer, so a request begins where the one before it ended."""
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                if CREATE.match(data):
                    data = self._on_the_node(client, data)
                daemon.sendall(data)
            daemon.shutdown(socket.SHUT_WR)

    def _on_the_node(self, client: socket.socket, data: bytes) -> bytes:
        while b"\r\n\r\n" not in data:
            data += client.recv(1 << 16)
        head, _, body = data.partition(b"\r\n\r\n")
        (length,) = LENGTH.findall(head)
        while len(body) < int(length):
            body += client.recv(1 << 16)
        document = json.loads(body)
        if document["HostConfig"]["NetworkMode"] == "host":
            document["HostConfig"]["NetworkMode"] = f"container:{self.space}"
        body = json.dumps(document).encode()
        return LENGTH.sub(b"\r\ncontent-length: %d" % len(body), head) + b"\r\n\r\n" + body


class NodesEngine:
    """Starts the real program of a node on each of them, inside its network."""

    def __init__(self, network: Network, names: Sequence[str] | None = None) -> None:
        self.network, self.names = network, tuple(names or network.names)
        self.programs: dict[str, subprocess.Popen[bytes]] = {}  # node -> its newest program
        self.jobs: dict[str, tuple[str, ...]] = {}  # job -> its nodes

    def on(self, names: Sequence[str]) -> NodesEngine:
        other = NodesEngine(self.network, names)
        other.programs, other.jobs = self.programs, self.jobs
        return other

    def addresses(self, names: Sequence[str]) -> dict[str, str]:
        return {name: self.network.addresses[name] for name in names}

    def render(self, job: Job) -> str:
        return f"# {job.name} on {', '.join(self.names)}\n"

    def submit(self, job: Job) -> str:
        for rank, name in enumerate(self.names):
            place = {
                "MASTER_ADDR": self.network.addresses[self.names[0]],
                "NNODES": str(len(self.names)),
                "NODE_RANK": str(rank),
                "NODE_NAME": name,
            }
            own = {"DOCKER_HOST": f"unix://{self.network.sockets[name].path}", "GLOO_SOCKET_IFNAME": FABRIC}
            entry = (sys.executable, "-m", "stackcheck.fleet.node", str(job.folder))
            with (job.folder / f"task-{rank}.log").open("ab") as log:
                self.programs[name] = subprocess.Popen(
                    ("ip", "netns", "exec", self.network.spaces[name], *entry),
                    env={**os.environ, **place, **own, "PYTHONPATH": str(ROOT)},
                    start_new_session=True,
                    stdout=log,
                    stderr=log,
                )
        self.jobs[job.id] = self.names
        return job.id

    def state(self, job_id: str) -> JobState:
        names = self.jobs[job_id]
        running = any(self.programs[name].poll() is None for name in names)
        word = "RUNNING" if running else "COMPLETED"
        return JobState(phase="running" if running else "ended", word=word, nodes=names)

    def node_states(self, job: Job, attempt: int) -> dict[int, NodeState]:
        told = {rank: read_state(job.attempt(attempt) / str(rank)) for rank in range(job.nodes)}
        return {rank: state for rank, state in told.items() if state}

    def nodes(self, names: Sequence[str]) -> dict[str, NodeFacts]:
        return {
            name: NodeFacts(
                name=name,
                rack="rack1",
                partition="mesh",
                alive=self._answers(name),
                words="allocated" if self._answers(name) else "down: not responding",
            )
            for name in names
        }

    def _answers(self, name: str) -> bool:
        """A program that a signal ended has lost its node."""
        code = self.programs[name].poll()
        return code is None or code >= 0

    def lose(self, name: str) -> None:
        """The power of a node goes: no packet leaves it, and its programs end at once."""
        self.network.lose(name)
        program = self.programs[name]
        program.kill()
        program.wait(300)
        label = f"label={LABEL}={program.pid}"
        while containers := command("docker", "ps", "--all", "--quiet", "--filter", label).split():
            # A run of another test may be removing what this program left, and then the engine refuses.
            subprocess.run(["docker", "rm", "--force", *containers], capture_output=True, check=False)

    def cancel(self, _job_id: str) -> None:
        for program in self.programs.values():
            if program.poll() is None:
                program.send_signal(signal.SIGTERM)
        for program in self.programs.values():
            program.wait(300)

    def drain(self, node: str, reason: str) -> None:
        raise AssertionError(f"{node} is drained: {reason}")


@contextlib.contextmanager
def mesh(image: str, *names: str) -> Iterator[Network]:
    """Nodes that reach each other; a path for a socket has to be short, so it is in /tmp."""
    folder = Path(tempfile.mkdtemp(prefix="stackcheck-mesh-", dir="/tmp"))
    network = Network(names, image, folder)
    try:
        network.start()
        yield network
    finally:
        network.stop()
        shutil.rmtree(folder, ignore_errors=True)
