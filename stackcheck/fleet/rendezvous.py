"""Where this node's torchrun meets the others. In: an engine's variables. Out: a `Rendezvous`. Pure.

Each engine that starts a job on several nodes sets variables of its own. The first of these that is complete
counts: torchrun's own (`PET_*`, Kubeflow), `MASTER_ADDR` with a node's rank, SkyPilot, Slurm, an Indexed Job
of Kubernetes. A set that is there in part is an error: half of the nodes would wait for the other half.
"""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stackcheck.engine.launch_lines import PORT
from stackcheck.errors import ConfigurationError

SERVICE = "STACKCHECK_SERVICE"  # set by our manifests: the headless service of an Indexed Job
JOB = "STACKCHECK_JOB"
NODES = "STACKCHECK_NODES"
_NAME = re.compile(r"(?:[^,\[]|\[[^\]]*\])+")  # no comma outside brackets
_PART = re.compile(r"([^\[]+)|\[([^\]]*)\]")


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """This node's place in a job."""

    nodes: int  # how many nodes the job has
    rank: int  # this node's, from 0
    address: str  # the name or address of node 0
    port: int  # where node 0 listens
    source: str  # which variables said so

    def variables(self) -> dict[str, str]:
        """What torchrun reads in place of its options."""
        return {
            "PET_NNODES": str(self.nodes),
            "PET_NODE_RANK": str(self.rank),
            "PET_MASTER_ADDR": self.address,
            "PET_MASTER_PORT": str(self.port),
        }


def find(variables: Mapping[str, str]) -> Rendezvous:
    """This node's place, from the variables that its engine set; one node alone if there are none.

    Raises:
        ConfigurationError: A set of variables is there in part, or a number in it is not one.
    """
    for source in (_torchrun, _master, _skypilot, _slurm, _indexed_job):
        found = source(variables)
        if found:
            if found.rank >= found.nodes:
                raise ConfigurationError(
                    "this node's rank is not one of the job's",
                    where=found.source,
                    got=f"rank {found.rank} of {found.nodes} nodes",
                    expected=f"0 to {found.nodes - 1}",
                    next_step="start as many nodes as the variables say",
                )
            return found
    return Rendezvous(nodes=1, rank=0, address="127.0.0.1", port=PORT, source="no variable: one node alone")


def _torchrun(variables: Mapping[str, str]) -> Rendezvous | None:
    """Torchrun reads PET_<OPTION> for each of its options; PET_NNODES may be a range for elastic jobs."""
    if "PET_NODE_RANK" not in variables and "PET_MASTER_ADDR" not in variables:
        return None
    return _read(
        variables, nodes="PET_NNODES", rank="PET_NODE_RANK", address="PET_MASTER_ADDR", port="PET_MASTER_PORT"
    )


def _master(variables: Mapping[str, str]) -> Rendezvous | None:
    """MASTER_ADDR counts with a rank of the node; alone it may be a rest of another job in a user's shell."""
    rank = next((name for name in ("NODE_RANK", "GROUP_RANK") if name in variables), None)
    if "MASTER_ADDR" not in variables or rank is None:
        return None
    nodes = "NNODES" if "NNODES" in variables else "NUM_NODES"
    return _read(variables, nodes=nodes, rank=rank, address="MASTER_ADDR", port="MASTER_PORT")


def _skypilot(variables: Mapping[str, str]) -> Rendezvous | None:
    """https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html."""
    if "SKYPILOT_NODE_RANK" not in variables:
        return None
    first, *_ = variables.get("SKYPILOT_NODE_IPS", "").split() or [""]
    given = {**variables, "the first of SKYPILOT_NODE_IPS": first} if first else variables
    return _read(
        given, nodes="SKYPILOT_NUM_NODES", rank="SKYPILOT_NODE_RANK", address="the first of SKYPILOT_NODE_IPS"
    )


def _slurm(variables: Mapping[str, str]) -> Rendezvous | None:
    """A task of srun. A step may run on fewer nodes than its job: the step's variables come first."""
    if "SLURM_NODEID" not in variables:
        return None
    nodes = next(
        (n for n in ("SLURM_STEP_NUM_NODES", "SLURM_NNODES") if n in variables), "SLURM_JOB_NUM_NODES"
    )
    names = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    first = next(hostnames(names), "")
    given = {**variables, "MASTER_ADDR": variables.get("MASTER_ADDR") or first}
    return _read(given, nodes=nodes, rank="SLURM_NODEID", address="MASTER_ADDR", port="MASTER_PORT")


def _indexed_job(variables: Mapping[str, str]) -> Rendezvous | None:
    """Pod 0 of an Indexed Job has the name JOB-0 in the job's headless service."""
    if "JOB_COMPLETION_INDEX" not in variables:
        return None
    given = dict(variables)
    if variables.get(JOB) and variables.get(SERVICE):
        given["MASTER_ADDR"] = f"{variables[JOB]}-0.{variables[SERVICE]}"
    return _read(given, nodes=NODES, rank="JOB_COMPLETION_INDEX", address="MASTER_ADDR", port="MASTER_PORT")


def _read(
    variables: Mapping[str, str], *, nodes: str, rank: str, address: str, port: str | None = None
) -> Rendezvous:
    where = variables.get(address, "")
    if not where:
        raise _incomplete(address, None, "the name or address of the first node", variables)
    return Rendezvous(
        nodes=_number(variables, nodes, 1, int),
        rank=_number(variables, rank, 0, int),
        address=where,
        port=_number(variables, port, 1, int) if port and variables.get(port) else PORT,
        source=f"{nodes}, {rank}, {address}",
    )


def _number(variables: Mapping[str, str], name: str, least: int, kind: Callable[[str], int]) -> int:
    text = variables.get(name)
    if text is None or not text.isascii() or not text.isdecimal() or kind(text) < least:
        raise _incomplete(name, text, f"a whole number from {least} on", variables)
    return kind(text)


def _incomplete(
    name: str, got: str | None, expected: str, variables: Mapping[str, str]
) -> ConfigurationError:
    prefixes = ("PET_", "MASTER_", "SLURM_N", "SLURM_STEP_N", "SLURM_JOB_N", "SKYPILOT_N", "JOB_COMPLETION_")
    there = sorted(each for each in variables if each.startswith(prefixes))
    return ConfigurationError(
        "the variables for several nodes are not complete",
        where=name,
        got=repr(got) if got is not None else f"not set; there are {', '.join(there) or 'none'}",
        expected=expected,
        next_step=f"set {name}, or remove the others of its kind",
    )


def hostnames(names: str) -> Iterator[str]:
    """The nodes of Slurm's short form, with any number of brackets in a name.

    `gpu[01-03,7],r[1-2]n[5-6]` -> gpu01 gpu02 gpu03 gpu7 r1n5 r1n6 r2n5 r2n6.
    """
    for name in _NAME.findall(names):
        parts = ([plain] if plain else list(_numbers(inside)) for plain, inside in _PART.findall(name))
        yield from map("".join, itertools.product(*parts))


def _numbers(inside: str) -> Iterator[str]:
    for part in inside.split(","):
        first, _, last = part.partition("-")
        yield from (f"{number:0{len(first)}d}" for number in range(int(first), int(last or first) + 1))
