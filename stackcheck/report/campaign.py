"""The planted faults. In: what `stackcheck prove --json` printed. Out: `Campaign`: planted and caught."""

from pathlib import Path

from stackcheck.files.border import Open, load_json


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
