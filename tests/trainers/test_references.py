"""Every family has its reference's loss curve on any processor, and a wrong job leaves the band there too."""

from pathlib import Path

import pytest
from agree import in_the_band, out_of_the_band

import loss_curve as curves
from conftest import Record
from tools import launch

FILES = sorted(Path(curves.__file__).with_name("curves").glob("CPU/*.json"))


def job(curve: curves.Curve) -> list[str]:
    """The flags of the reference's job."""
    given = {name: value for name, value in curve.job.items() if value is not None and name != "portable"}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", f"{value}")]
    return ["--device", "cpu", *launch.COMPARABLE, *flags]


# Every layer has code of its own in one of these; the other families put the same layers together.
QUICK = {"llama-tiny", "moe-tiny", "flux-tiny"}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=() if path.stem in QUICK else pytest.mark.slow) for path in FILES],
    ids=lambda path: path.stem,
)
def test_the_job_of_a_reference_stays_in_its_band(path: Path, record: Record) -> None:
    curve = curves.load(path)
    found = record(1, *job(curve))
    curves.comparable(curve, found)
    in_the_band(curves.judge(curve, found["losses"]))


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_learning_rate_a_tenth_too_large_leaves_the_band(path: Path, record: Record) -> None:
    curve = curves.load(path)
    found = record(1, *job(curve), "--lr", f"{1.1 * curve.job['lr']}")
    out_of_the_band(curves.judge(curve, found["losses"]))
