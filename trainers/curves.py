"""Loss curves as references. In: records of train.py. Out: a reference as data, what is wrong with a curve.

Two systems never repeat each other's bits, and rounding grows: the band around a reference starts narrow and
widens geometrically (pytorch/torchtitan saw 0.1 % between vendors to step 24 and 1 % at step 28). A band
alone would accept a job that learns nothing beside a reference that learned little: there is a floor too.
"""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from errors import RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

SCHEMA = 1
# What decides which batches come and how weights move; everything else may differ between two systems.
OPTIONS = ("model", "size", "layers", "data", "steps", "lr_warmup", "clip", "seed", "portable")
PLAN = ("seq_len", "global_batch", "lr")
GAINED = 0.7  # of the reference's fall a curve must make
LEAST_FALL = 0.03  # of its first loss a reference must fall, or no floor would mean anything
LEAST_LEFT = 0.01  # of its first loss must be left: what is known by heart differs by factors


@dataclass(frozen=True, kw_only=True)
class Band:
    """Relative half widths at the first and the last step."""

    first: float
    last: float

    def width(self, step: int, steps: int) -> float:
        """Half width at a step counted from 0, as a share of the reference's loss."""
        return self.first * (self.last / self.first) ** (step / max(1, steps - 1))


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A reference. `floor`: what the mean of the last `tail` losses may be at most."""

    job: dict[str, Any]
    losses: list[float]
    band: Band
    tail: int
    floor: float
    provenance: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """No `problems`: in the band. `worst_share`: the largest deviation, in widths of the band."""

    problems: list[str]
    worst_share: float | None
    worst_step: int | None


def job_of(record: dict[str, Any]) -> dict[str, Any]:
    """What two runs must have in common for their losses to be comparable."""
    return {name: record["options"][name] for name in OPTIONS} | {name: record["plan"][name] for name in PLAN}


def reference(record: dict[str, Any], band: Band, *, measured: str) -> Curve:
    """The reference that a whole, sound run makes. Raises RefusedError for any other."""
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
            "its data by heart, and no band around that says anything; take fewer steps or more data"
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
    """Whether a curve of the same job lies in the band and learned; fails closed."""
    steps, problems = len(curve.losses), []
    if len(losses) != steps:
        problems.append(f"{len(losses)} losses, the reference has {steps}")
    broken = [step for step, loss in enumerate(losses) if loss is None or not math.isfinite(loss)]
    if broken:
        problems.append(f"step {broken[0]}: the loss is not a finite number ({len(broken)} in all)")
    shares = {
        step: abs(loss - want) / (want * curve.band.width(step, steps))
        for step, (loss, want) in enumerate(zip(losses, curve.losses, strict=False))
        if step not in broken
    }
    outside = [step for step, share in shares.items() if not share <= 1]
    worst = max(shares, key=shares.__getitem__, default=None)
    if outside:
        problems.append(_outside(curve, losses, outside, worst))
    problems += _floor(curve, losses, broken)
    return Verdict(problems=problems, worst_share=None if worst is None else shares[worst], worst_step=worst)


def _outside(curve: Curve, losses: Sequence[float | None], outside: list[int], worst: int | None) -> str:
    def at(step: int) -> str:
        want, width = curve.losses[step], curve.band.width(step, len(curve.losses))
        off = abs(losses[step] / want - 1)
        return f"step {step}: {losses[step]:.5f} is {off:.2%} from {want:.5f}, {width:.2%} allowed"

    return f"outside the band at {len(outside)} steps; first {at(outside[0])}; worst {at(worst)}"


def _floor(curve: Curve, losses: Sequence[float | None], broken: list[int]) -> list[str]:
    last = losses[-curve.tail :]
    if broken or len(last) < curve.tail:
        return [f"the last {curve.tail} losses are not all there: nothing says that it learned"]
    mean = statistics.mean(last)
    if mean <= curve.floor:
        return []
    found = f"its last {curve.tail} losses are {mean:.4f} on average"
    return [f"it did not learn: {found}, the floor is {curve.floor:.4f}"]


def joined(records: Iterable[dict[str, Any]]) -> list[float | None]:
    """The losses of segments that follow each other. Raises RefusedError for a gap or another job."""
    losses: list[float | None] = []
    ordered = sorted(records, key=lambda record: record["first_step"])
    for record in ordered:
        if record["first_step"] != len(losses):
            raise RefusedError(f"a segment starts after step {record['first_step']}, not {len(losses)}")
        if job_of(record) != job_of(ordered[0]):
            raise RefusedError("the segments are of different jobs")
        losses += record["losses"]
    return losses


def comparable(curve: Curve, record: dict[str, Any]) -> None:
    """Raises RefusedError, naming what differs, when the record is of another job than the reference."""
    mine, theirs = job_of(record), curve.job
    other = {name: (theirs.get(name), mine[name]) for name in mine if theirs.get(name) != mine[name]}
    if other:
        raise RefusedError(f"another job than the reference's (reference, this run): {other}")


def save(curve: Curve, path: Path) -> None:
    """Write the reference, one key a line."""
    facts = {"schema": SCHEMA, **asdict(curve), "losses": [round(loss, 7) for loss in curve.losses]}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{{\n{lines}\n}}\n")


def load(path: Path) -> Curve:
    """Read a reference. Raises RefusedError for another schema, a missing key or a loss that is no number."""
    facts = json.loads(path.read_text())
    if facts.pop("schema", None) != SCHEMA:
        raise RefusedError(f"{path}: not a loss curve of schema {SCHEMA}")
    try:
        curve = Curve(**{**facts, "band": Band(**facts["band"])})
    except (KeyError, TypeError) as error:
        raise RefusedError(f"{path}: {error}") from error
    if not curve.losses or not all(math.isfinite(value) for value in (*curve.losses, curve.floor)):
        raise RefusedError(f"{path}: a loss or the floor is not a finite number")
    return curve
