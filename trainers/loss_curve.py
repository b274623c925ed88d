"""Loss curves as references. In: records of train.py. Out: a reference as data, or the problems of a curve.

Two systems never give the same bits, and rounding differences grow. So the band around a reference is narrow
at first and widens geometrically (pytorch/torchtitan saw 0.1 % between vendors up to step 24 and 1 % at step
28). A wide band would accept a job that learns nothing, so the last losses must also be below a floor.
curves/ has the references.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

SCHEMA = 1
# What decides the batches and the updates of the weights. All else may differ between two systems.
OPTIONS = ("model", "size", "layers", "data", "steps", "lr_warmup", "clip", "seed", "portable")
PLAN = ("seq_len", "global_batch", "lr")
GAINED = 0.7  # a curve must fall by this share of the reference's fall
LEAST_FALL = 0.03  # a reference must fall by this share of its first loss; below it a floor proves nothing
# And it must keep this share of it: losses of data known by heart differ by factors between systems.
LEAST_LEFT = 0.01


@dataclass(frozen=True, kw_only=True)
class Band:
    """Relative half widths at the first and the last step."""

    first: float
    last: float

    @classmethod
    def parse(cls, text: str) -> Band:
        """The band of a flag's FIRST:LAST."""
        first, _, last = text.partition(":")
        return cls(first=float(first), last=float(last))

    def width(self, step: int, steps: int) -> float:
        """Half width at a step counted from 0, as a share of the reference's loss."""
        growth: float = (self.last / self.first) ** (step / max(1, steps - 1))
        return self.first * growth


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A reference. `floor`: the mean of the last `tail` losses of a curve must not be above it."""

    job: dict[str, Any]
    losses: list[float]
    band: Band
    tail: int
    floor: float
    provenance: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """In the band if there are no `problems`.

    `worst_share`: the largest deviation, in half widths of the band.
    """

    problems: list[str]
    worst_share: float | None
    worst_step: int | None


def job_of(record: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for their losses to be comparable."""
    job = {name: record["options"][name] for name in OPTIONS} | {name: record["plan"][name] for name in PLAN}
    if digest := record.get("extra", {}).get("data_digest"):
        # Two systems have one text under two paths; what they read decides, and how it was joined.
        job["data"] = f"sha256:{digest}, {record['options']['pack'] or 'concat'}"
    return job


def reference(record: dict[str, Any], band: Band, *, measured: str) -> Curve:
    """The reference that a complete, sound run makes. Raises RefusedError for any other run."""
    losses, steps = record["losses"], record["options"]["steps"]
    if record["problems"] or record["first_step"] or len(losses) != steps:
        raise RefusedError(f"no reference: {record['problems'] or f'{len(losses)} of {steps} losses'}")
    tail = max(1, steps // 10)
    fall = losses[0] - statistics.mean(losses[-tail:])
    if fall < LEAST_FALL * losses[0]:
        raise RefusedError(f"no reference: the loss fell from {losses[0]:.4f} by {fall:.4f} only")
    if losses[0] - fall < LEAST_LEFT * losses[0]:
        raise RefusedError(
            f"no reference: the loss fell from {losses[0]:.4f} to {losses[0] - fall:.4f}: the model knows "
            "its data by heart, so a band around it proves nothing; take fewer steps or more data"
        )
    return Curve(
        job=job_of(record),
        losses=losses,
        band=band,
        tail=tail,
        floor=losses[0] - GAINED * fall,
        provenance={
            "measured": measured,
            "torch": record["software"]["torch"],
            "device": record["device"]["model"],
            "ranks": record["world_size"],
            "steps": steps,
            "seed": record["options"]["seed"],
            **{name: record["options"][name] for name in ("precision", "parallel", "implementation")},
        },
    )


def judge(curve: Curve, losses: Sequence[float | None]) -> Verdict:
    """Whether a curve of the same job is in the band and learned.

    Fails closed: a missing loss is a problem.
    """
    steps, finite = len(curve.losses), _finite(losses)
    shares = {
        step: abs(finite[step] - want) / (want * curve.band.width(step, steps))
        for step, want in enumerate(curve.losses)
        if step in finite
    }
    outside = [step for step, share in shares.items() if not share <= 1]
    worst = max(shares, key=shares.__getitem__, default=None)
    problems = unlearned(curve, losses)
    if outside and worst is not None:
        problems.append(_outside(curve, finite, outside, worst))
    return Verdict(problems=problems, worst_share=None if worst is None else shares[worst], worst_step=worst)


def unlearned(curve: Curve, losses: Sequence[float | None]) -> list[str]:
    """Why this curve does not show that its model learned the job, wherever its band is."""
    problems, finite = [], _finite(losses)
    if len(losses) != len(curve.losses):
        problems.append(f"{len(losses)} losses, the reference has {len(curve.losses)}")
    broken = [step for step in range(len(losses)) if step not in finite]
    if broken:
        problems.append(f"step {broken[0]}: the loss is not a finite number ({len(broken)} in all)")
    last = [finite[step] for step in range(len(losses))[-curve.tail :] if step in finite]
    return problems + _floor(curve, last if not broken else [])


def _finite(losses: Sequence[float | None]) -> dict[int, float]:
    return {step: loss for step, loss in enumerate(losses) if loss is not None and math.isfinite(loss)}


def _outside(curve: Curve, losses: Mapping[int, float], outside: list[int], worst: int) -> str:
    def at(step: int) -> str:
        want, width = curve.losses[step], curve.band.width(step, len(curve.losses))
        off = abs(losses[step] / want - 1)
        return f"step {step}: {losses[step]:.5f} is {off:.2%} from {want:.5f}, {width:.2%} allowed"

    return f"outside the band at {len(outside)} steps; first {at(outside[0])}; worst {at(worst)}"


def _floor(curve: Curve, last: list[float]) -> list[str]:
    if len(last) < curve.tail:
        return [f"some of the last {curve.tail} losses are missing, so nothing shows that the model learned"]
    mean = statistics.mean(last)
    if mean <= curve.floor:
        return []
    found = f"its last {curve.tail} losses are {mean:.4f} on average"
    return [f"it did not learn: {found}, the floor is {curve.floor:.4f}"]


def joined(records: Iterable[dict[str, Any]]) -> list[float | None]:
    """The losses of consecutive segments of one job. Raises RefusedError for a gap, or for different jobs."""
    losses: list[float | None] = []
    ordered = sorted(records, key=lambda record: record["first_step"])
    for record in ordered:
        if record["first_step"] != len(losses):
            raise RefusedError(
                f"a segment starts after step {record['first_step']}, not {len(losses)}: "
                "a record is missing, or a system did not resume"
            )
        if job_of(record) != job_of(ordered[0]):
            raise RefusedError("the segments are of different jobs; judge the records of one job at a time")
        losses += record["losses"]
    return losses


def comparable(curve: Curve, record: dict[str, Any]) -> None:
    """Raises RefusedError, with the differences, if the record and the reference are of different jobs."""
    mine, theirs = job_of(record), curve.job
    other = {name: (theirs.get(name), mine[name]) for name in mine if theirs.get(name) != mine[name]}
    if other:
        raise RefusedError(
            f"the record is of another job than the reference; differences (reference, record): {other}"
        )


def save(curve: Curve, path: Path) -> None:
    """Write the reference with one key per line."""
    facts = {"schema": SCHEMA, **asdict(curve), "losses": [round(loss, 7) for loss in curve.losses]}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{{\n{lines}\n}}\n")


def load(path: Path) -> Curve:
    """Read a reference.

    Raises RefusedError for another schema, a missing key, or a loss that is not finite.
    """
    facts = json.loads(path.read_text())
    if facts.pop("schema", None) != SCHEMA:
        raise RefusedError(
            f"{path}: expected a loss curve of schema {SCHEMA}; record it again with tools/curve.py"
        )
    try:
        curve = Curve(**{**facts, "band": Band(**facts["band"])})
    except (KeyError, TypeError) as error:
        raise RefusedError(f"{path}: {error}") from error
    if not curve.losses or not all(math.isfinite(value) for value in (*curve.losses, curve.floor)):
        raise RefusedError(f"{path}: a loss or the floor is not a finite number")
    return curve
