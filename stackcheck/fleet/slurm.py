"""Slurm: render a batch script, submit it, ask how its job and nodes are, end it. In: a job. Out: facts.

Everything goes through sbatch, scontrol, sinfo and scancel. Results come from files, never from Slurm's
accounting, which many sites do not have.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from stackcheck.engine.launch_lines import sbatch_lines
from stackcheck.errors import ConfigurationError, EngineError
from stackcheck.files.atomic import write_atomically
from stackcheck.fleet.engines import JobState, NodeFacts, Phase, ask
from stackcheck.fleet.job import SAID, Job, NodeState, read_state
from stackcheck.fleet.rendezvous import hostnames

SCRIPT, TAKEN = "batch.sh", "taken"
SLACK_MIN = 5  # the nodes stop by themselves; Slurm's limit is for those that cannot
ENDED: dict[str, Phase] = {
    "COMPLETED": "ended",
    "COMPLETING": "ended",
    "FAILED": "ended",  # a task's exit code: the files say which
    "CANCELLED": "cancelled",
    "PREEMPTED": "cancelled",
    "TIMEOUT": "out of time",
    "DEADLINE": "out of time",
    "NODE_FAIL": "a node failed",
    "BOOT_FAIL": "a node failed",
    "OUT_OF_MEMORY": "out of memory",
}
WAITING = {
    "PENDING",
    "CONFIGURING",
    "REQUEUED",
    "REQUEUE_HOLD",
    "REQUEUE_FED",
    "SPECIAL_EXIT",
    "RESV_DEL_HOLD",
}
# Of the elements of an array, the state that counts for all comes first.
ORDER: tuple[Phase, ...] = (
    *("waiting", "running"),
    *("a node failed", "out of memory", "out of time", "cancelled", "ended"),
)
DEAD = ("DOWN", "FAIL", "ERROR", "POWERED_DOWN", "NO_RESPOND", "UNKNOWN")


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """How this site's Slurm is asked.

    Attributes:
        program: What starts `stackcheck.fleet.node` on a node.
    """

    partition: str | None = None  # where the job goes; None: the site's default
    nodelist: tuple[str, ...] = ()  # the nodes, by name; empty: any
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    program: tuple[str, ...] = ("python3", "-m", "stackcheck.fleet.node")
    _said: dict[tuple[str, int], dict[str, NodeState]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def render(self, job: Job) -> str:
        """The batch script: one task on each node, each with the whole node. Pure.

        In an array, the script is that of one node.

        Raises:
            ConfigurationError: A text has a character that would begin another line of the script.
        """
        if job.array and self.nodelist:
            raise ConfigurationError(
                "a job array takes nodes as they become free",
                where="--node",
                got=self.nodelist[0],
                expected="no name, or no --array",
                next_step="choose by --partition, --exclude or --sbatch=--constraint=…",
            )
        directives = [*sbatch_lines(self._head(job)), *(f"#SBATCH {line}" for line in self.options)]
        task, log = shlex.join([*self.program, str(job.folder)]), f"task-%{'a' if job.array else 't'}.log"
        lines = [
            "#!/bin/sh",
            *directives,
            f"# {job.name}: {job.tier} suites on {job.nodes} nodes, by {job.container}",
            f"# image manifest {job.manifest_digest}",
            f"# image config   {job.config_digest}: compared on each node before the start",
            *(self._once(job) if job.array else ()),
            "# A node that dies does not end the others; who leaves no result has failed.",
            "srun --no-kill --kill-on-bad-exit=0 --wait=0 --ntasks-per-node=1 --cpu-bind=none \\",
            f"  --output={shlex.quote(str(job.folder / log))} --open-mode=append \\",
            f"  {task}",
        ]
        for line in lines:
            if not line.isprintable():
                raise ConfigurationError(
                    "a batch script cannot hold this text",
                    where="an option of Slurm, or the folder of the checkout",
                    got=repr(line),
                    expected="text in one line, without control characters",
                    next_step="repeat the command without them",
                )
        return "".join(f"{line}\n" for line in lines)

    def _once(self, job: Job) -> Iterator[str]:
        """Lines by which elements that still wait get other nodes: Slurm would give them this one once more.

        scontrol has no `+=` for this list, and calls it an error that some elements no longer wait.
        """
        taken, before = shlex.quote(str(job.folder / TAKEN)), ",".join((*self.exclude, ""))
        names = f'{shlex.quote(before)}"$(ls {taken} | paste -sd , -)"'
        update = f'scontrol update JobId="$SLURM_ARRAY_JOB_ID" ExcNodeList={names} >/dev/null 2>&1'
        yield f'mkdir -p {taken} && touch {taken}/"$SLURMD_NODENAME"'
        yield f"flock {taken} sh -c {shlex.quote(update)}"

    def _head(self, job: Job) -> dict[str, object]:
        minutes = math.ceil(job.limit_s / 60) + SLACK_MIN
        return {
            "job-name": f"stackcheck-{job.id}",
            "array": f"0-{job.nodes - 1}" if job.array else None,
            "nodes": 1 if job.array else job.nodes,
            "ntasks-per-node": 1,
            "gpus-per-node": job.devices or None,
            "time": minutes,
            "partition": self.partition,
            "nodelist": ",".join(self.nodelist) or None,
            "exclude": ",".join(self.exclude) or None,
            "output": job.folder / "batch.log",
            "open-mode": "append",
            "exclusive": True,
            "no-kill": True,
            "no-requeue" if job.array else "requeue": True,
        }

    def submit(self, job: Job) -> str:
        """Write the script, and hand it to Slurm; the id of its job.

        Raises:
            EngineError: Slurm refused it, or does not answer.
        """
        script = job.folder / SCRIPT
        write_atomically(script, (self.render(job).encode(),))
        return _slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]

    def state(self, job_id: str) -> JobState:
        """How a job is now; one that Slurm no longer knows has ended.

        Raises:
            EngineError: Slurm does not answer.
        """
        try:
            text = _slurm("scontrol", "show", "job", "--oneliner", job_id)
        except EngineError as error:
            if "Invalid job id" in str(error):
                return JobState(phase="ended", word="UNKNOWN", reason="Slurm no longer knows the job")
            raise
        return parse_job(text)

    def node_states(self, job: Job, attempt: int) -> dict[int, NodeState]:
        """What each node wrote about itself: one listing, and the files of those who said something new.

        Slurm does not say it: its jobs and steps have a state, the tasks of a step have none.
        """
        folder, known = job.attempt(attempt), self._said.setdefault((job.id, attempt), {})
        try:
            names = [path.name for path in (folder / SAID).iterdir()]
        except FileNotFoundError:
            return {}
        new = {name.partition(".")[0] for name in names if name not in known}
        for rank in new & {str(number) for number in range(job.nodes)}:
            if state := read_state(folder / rank):
                known |= dict.fromkeys((f"{rank}.{state.state}", f"{rank}.running"), state)
        return {state.rank: state for state in known.values()}

    def nodes(self, names: Sequence[str]) -> dict[str, NodeFacts]:
        """What Slurm knows of nodes: state, partitions, and the switch that they hang on.

        Raises:
            EngineError: Slurm does not answer.
        """
        if not names:
            return {}
        text = _slurm("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%R|%T|%E")
        return parse_nodes(text, parse_topology(_topology()))

    def addresses(self, names: Sequence[str]) -> dict[str, str]:
        """Node -> the address by which the other nodes reach it.

        Raises:
            EngineError: Slurm does not answer.
        """
        text = _slurm("sinfo", "--noheader", "--Node", f"--nodes={','.join(names)}", "--format=%N|%o")
        return dict(line.split("|", 1) for line in text.splitlines() if "|" in line)

    def on(self, names: Sequence[str]) -> Slurm:
        """The same site, on exactly these nodes."""
        return dataclasses.replace(self, nodelist=tuple(names), exclude=())

    def cancel(self, job_id: str) -> None:
        """End a job; one that has ended is left alone.

        Raises:
            EngineError: Slurm does not answer.
        """
        _slurm("scancel", "--quiet", job_id)

    def drain(self, node: str, reason: str) -> None:
        """Keep jobs away from a node; only when the user asked for it.

        Raises:
            EngineError: Slurm refused: it takes an operator of the cluster.
        """
        drain(node, reason)


def drain(node: str, reason: str) -> None:
    """Keep jobs away from a node.

    Raises:
        EngineError: Slurm refused: it takes an operator of the cluster.
    """
    _slurm("scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}")


def parse_job(text: str) -> JobState:
    """The state in the lines of `scontrol show job --oneliner`, one for each element of an array. Pure."""
    parts = [_parse_line(line) for line in text.strip().splitlines() or [""]]
    nodes = {first + n: name for first, part in parts for n, name in enumerate(part.nodes)}
    named = tuple(nodes.get(rank, "") for rank in range(max(nodes, default=-1) + 1))
    _, least_ended = min(parts, key=lambda part: ORDER.index(part[1].phase))
    return dataclasses.replace(least_ended, nodes=named)


def _parse_line(text: str) -> tuple[int, JobState]:
    """The rank of its first node, and the state of a job or an element."""
    fields = dict(re.findall(r"(?:^|\s)([A-Za-z:/]+)=(\S*)", text))
    word = fields.get("JobState", "UNKNOWN")
    phase: Phase = ENDED.get(word) or ("waiting" if word in WAITING else "running")
    names = fields.get("NodeList", "")
    task = fields.get("ArrayTaskId", "")  # `2-9%4` of those that wait
    return int(task) if task.isdecimal() else 0, JobState(
        phase=phase,
        word=word,
        reason="" if fields.get("Reason", "None") == "None" else fields["Reason"],
        attempt=int(fields.get("Restarts") or 0),
        nodes=tuple(hostnames(names)) if names not in {"", "(null)"} else (),
    )


def parse_nodes(text: str, switches: dict[str, str]) -> dict[str, NodeFacts]:
    """The nodes in the lines of sinfo; a node of several partitions has several lines. Pure."""
    found: dict[str, NodeFacts] = {}
    for line in filter(None, text.splitlines()):
        name, partition, state, reason = line.split("|", 3)
        before = found.get(name)
        partitions = f"{before.partition},{partition}" if before else partition
        word = state.upper()
        found[name] = NodeFacts(
            name=name,
            partition=partitions,
            rack=switches.get(name, ""),
            alive=not word.startswith(DEAD) and not word.endswith("*"),
            words=f"{state}{'' if reason in {'none', ''} else f': {reason}'}",
        )
    return found


def parse_topology(text: str) -> dict[str, str]:
    """Node -> its leaf switch, from `scontrol show topology`; empty at a site that has no tree. Pure."""
    leaves = re.findall(r"SwitchName=(\S+) Level=0 .*?Nodes=(\S+)", text)
    return {node: switch for switch, names in leaves for node in hostnames(names)}


def _topology() -> str:
    try:
        return _slurm("scontrol", "show", "topology")
    except EngineError:
        return ""  # a site without the plug-in


def _slurm(*command: str) -> str:
    return ask("Slurm", *command, package="slurm-client", look="scontrol ping; sinfo")
