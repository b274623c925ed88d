"""What others measured, for the page. In: a folder of contributed bundles. Out: `Others`, one a device model.

A bundle is read as `stackcheck contribute --check` reads it: one that is wrong stops the report.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stackcheck.proof import contribution
from stackcheck.proof.contribution import Bundle


@dataclass(frozen=True, kw_only=True)
class OthersFigure:
    """The median of one figure, and from how many runs."""

    metric: str
    conditions: str
    median: float
    unit: str
    runs: int


@dataclass(frozen=True, kw_only=True)
class Others:
    """All bundles of one device model; `days` are the first and the last one."""

    model: str
    bundles: int
    contributors: int
    passed: int
    days: tuple[str, str]
    figures: tuple[OthersFigure, ...]


def load_others(folder: Path, root: Path) -> tuple[Others, ...]:
    """What the bundles of a folder say, signed by the contributors that it names.

    Raises:
        CertificateError: A bundle is not signed by one of them.
        ChecksFailedError: A bundle says more than it may; or the folder has none.
    """
    found = list(contribution.folder(folder, root))
    return tuple(of_model(found, model) for model in sorted({bundle.told.model for bundle in found}))


def of_model(bundles: Sequence[Bundle], model: str) -> Others:
    """The bundles of one model, put together. Pure."""
    mine = [bundle for bundle in bundles if bundle.told.model == model]
    units = {figure.metric: figure.unit for bundle in mine for figure in bundle.told.figures}
    days = sorted(bundle.told.day for bundle in mine)
    return Others(
        model=model,
        bundles=len(mine),
        contributors=len({bundle.signer for bundle in mine}),
        passed=sum(bundle.told.verdict == "PASSED" for bundle in mine),
        days=(days[0], days[-1]),
        figures=tuple(
            OthersFigure(
                metric=metric,
                conditions=" ".join(f"{name}={value}" for name, value in json.loads(conditions).items()),
                median=median,
                unit=units[metric],
                runs=runs,
            )
            for (metric, conditions), (median, runs) in contribution.medians(mine, model).items()
        ),
    )
