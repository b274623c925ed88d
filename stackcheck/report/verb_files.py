"""What other verbs left for the page. In: their files. Out: `FleetFile`s, a `NightlyFile`, a `Campaign`.

`stackcheck fleet run` writes build/fleet/*/fleet.json: its nodes are grouped by rack and partition; the
groups with the most bad nodes come first, and in each group the nodes that stand out. `stackcheck nightly`
writes build/nightly/night.json, and `stackcheck prove --json` prints the planted faults.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AwareDatetime, Field, FiniteFloat, ValidationError

from stackcheck.files.border import Open, load_json


class ImageNotRun(Open):
    """An image that was not run, and why."""

    tag: str
    why: str


class NightlyFile(Open):
    """The file, as far as the report shows it."""

    schema_: Annotated[Literal[1], Field(alias="schema")]
    started: AwareDatetime
    node: str
    line: str
    warnings: tuple[str, ...]
    reboot_pending: str | None
    skipped: tuple[ImageNotRun, ...]


def load_night(path: Path) -> NightlyFile:
    """Read the file; raises `ConfigurationError` if it is another document, or of a different version."""
    return load_json(
        NightlyFile,
        path,
        "the file of the last night cannot be read",
        expected="what stackcheck nightly writes",
        next_step="run the night again: stackcheck nightly",
    )


class PlantedFault(Open):
    """A planted fault, the check that is to catch it, and whether it did."""

    name: str
    check: str
    state: str


class Campaign(Open):
    """All planted faults."""

    planted: int
    caught: int
    healthy_runs: int
    false_alarms: int
    faults: tuple[PlantedFault, ...]

    @property
    def suites(self) -> dict[str, list[PlantedFault]]:
        """Suite file -> its faults, the missed ones first."""
        found: dict[str, list[PlantedFault]] = {}
        for fault in sorted(self.faults, key=lambda one: (one.state == "caught", one.name)):
            found.setdefault(fault.check.partition("::")[0], []).append(fault)
        return dict(sorted(found.items()))


def load_campaign(path: Path) -> Campaign:
    """Read what `prove --json` printed; raises `ConfigurationError` if it is not such a document."""
    return load_json(
        Campaign,
        path,
        "the file of planted faults cannot be read",
        expected="the output of stackcheck prove --json",
        next_step="stackcheck prove --json > build/faults.json",
    )


FOLDER = "build/fleet"
SHOWN_CHECKS, SHOWN_NODES = 8, 200  # in the table of nodes
SHOWN_LINKS = 16  # nodes up to which the page has a table of their links
Status = Literal["PASSED", "FAILED", "UNFIT", "MEASURED"]
BAD = ("FAILED", "UNFIT")


class JobPart(Open):
    """What the nodes ran."""

    id: str
    name: str
    engine: str
    tier: str
    only: str | None
    nodes: int
    created: AwareDatetime


class NodePart(Open):
    """How one node ended."""

    node: str
    rack: str
    partition: str
    status: Status
    reasons: tuple[str, ...]
    devices: tuple[str, ...] | None
    checks: dict[str, str]

    @property
    def passed(self) -> int:
        """How many checks passed."""
        return sum(outcome == "passed" for outcome in self.checks.values())


class StragglerPart(Open):
    """A figure that stands out from the fleet."""

    node: str
    check: str
    metric: str
    unit: str
    value: FiniteFloat
    median: FiniteFloat
    loss: float


class CulpritPart(Open):
    """What bad pairs come from."""

    kind: Literal["node", "switch", "link"]
    names: tuple[str, ...]
    because: str


class LinksPart(Open):
    """What the pairs showed: GB/s, or why there is no speed."""

    pairs: tuple[tuple[str, str, FiniteFloat], ...]
    failed: tuple[tuple[str, str, str], ...]
    culprits: tuple[CulpritPart, ...]
    whole_gb_per_s: FiniteFloat | None
    whole_error: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Every node that was in a pair."""
        return tuple(sorted({name for pair in (*self.pairs, *self.failed) for name in pair[:2]}))

    def between(self, one: str, other: str) -> str:
        """What the table says of two nodes."""
        speeds = {frozenset(pair[:2]): f"{pair[2]:.3g}" for pair in self.pairs}
        broken = {frozenset(pair[:2]): "failed" for pair in self.failed}
        return (speeds | broken).get(frozenset((one, other)), "")

    def is_bad(self, one: str, other: str) -> bool:
        """Whether a culprit explains this pair."""
        blamed = [frozenset(culprit.names) for culprit in self.culprits]
        return any(names <= {one, other} for names in blamed)


class LostPart(Open):
    """A node that was lost while it trained."""

    node: str
    because: str
    at_step: dict[str, int]


class LayoutPart(Open):
    """How one layout trained."""

    first_step: int
    losses: tuple[FiniteFloat, ...]


class TrainingPart(Open):
    """How the nodes trained together."""

    nodes: tuple[str, ...]
    ranks_of_a_node: int
    lost: tuple[LostPart, ...]
    errors: tuple[str, ...]
    layouts: dict[str, LayoutPart]


@dataclass(frozen=True)
class FleetGroup:
    """The nodes of a rack and a partition."""

    rack: str
    partition: str
    nodes: tuple[NodePart, ...]

    @property
    def bad(self) -> int:
        """How many did not pass."""
        return sum(node.status in BAD for node in self.nodes)


class FleetFile(Open):
    """One run of a fleet."""

    job: JobPart
    status: Status
    nodes: tuple[NodePart, ...]
    stragglers: tuple[StragglerPart, ...]
    links: LinksPart | None
    training: TrainingPart | None

    @property
    def counts(self) -> Counter[str]:
        """How many nodes ended how."""
        return Counter(node.status for node in self.nodes)

    @property
    def checks(self) -> tuple[str, ...]:
        """The checks that did not pass on every node, those that failed on most nodes first."""
        found = [item for node in self.nodes for item in node.checks.items() if item[1] != "passed"]
        skipped = Counter(check for check, outcome in found if outcome == "skipped")
        failed = Counter(check for check, outcome in found if outcome != "skipped")
        names = dict.fromkeys(check for check, _ in found)
        return tuple(sorted(names, key=lambda name: (-failed[name], -skipped[name]))[:SHOWN_CHECKS])

    @property
    def slow(self) -> Counter[str]:
        """Node -> how many of its figures stand out."""
        return Counter(item.node for item in self.stragglers)

    @property
    def hidden(self) -> int:
        """How many nodes the table leaves out; they passed, and do not stand out."""
        return len(self.nodes) - len(self._shown())

    def _shown(self) -> Sequence[NodePart]:
        telling = [node for node in self.nodes if node.status in BAD or self.slow[node.node]]
        names = {node.node for node in telling}
        return telling + [node for node in self.nodes if node.node not in names][:SHOWN_NODES]

    def groups(self) -> list[FleetGroup]:
        """The racks and partitions, the worst first; in each the nodes that stand out first."""
        found: dict[tuple[str, str], list[NodePart]] = {}
        for node in self._shown():
            found.setdefault((node.rack, node.partition), []).append(node)
        made = [FleetGroup(rack, partition, tuple(nodes)) for (rack, partition), nodes in found.items()]
        return sorted(made, key=lambda group: (-group.bad / len(group.nodes), group.rack, group.partition))


def load_fleets(root: Path) -> tuple[tuple[FleetFile, ...], tuple[str, ...]]:
    """The fleet runs of a checkout, the newest first, and what could not be read."""
    found, problems = [], []
    for path in sorted((root / FOLDER).glob("*/fleet.json")):
        try:
            found.append(FleetFile.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError) as error:
            problems.append(f"a fleet run cannot be read: {path}: {str(error).splitlines()[0]}")
    return tuple(sorted(found, key=lambda run: run.job.created, reverse=True)), tuple(problems)
