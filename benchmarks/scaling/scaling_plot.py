"""Efficiency against the ideal as a picture. In: predicted, measured, published points. Out: SVG. Pure.

The three kinds have a form and a colour of their own, so that a prediction is not read as a measurement; the
page that shows the picture may be light or dark.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Kind = Literal["predicted", "measured", "published"]
WIDTH, HEIGHT = 820, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 32, 64, 64
STEP = 0.05  # between two lines of the grid
COLOURS = {"predicted": "#0b57a4", "measured": "#17703a", "published": "#b3261e", "ideal": "#6b7076"}
HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{title}" \
font-family="system-ui, sans-serif" font-size="13">
<title>{title}</title>
<rect width="{width}" height="{height}" fill="#fcfcfa"/>
<text x="{left}" y="24" font-size="15" font-weight="600" fill="#1b1d20">{title}</text>"""


@dataclass(frozen=True, kw_only=True)
class Dot:
    """An efficiency at a number of GPUs; 1.0 is the ideal."""

    gpus: int
    efficiency: float
    kind: Kind


def plot(title: str, dots: Sequence[Dot]) -> str:
    """The picture: GPUs by doublings to the right, efficiency up."""
    space = _Space(dots)
    lines = [HEAD.format(width=WIDTH, height=HEIGHT, left=LEFT, title=escape(title, {'"': "&quot;"}))]
    lines += [*space.grid(), *space.curve(), *space.marks(), *_legend(dots), "</svg>"]
    return "\n".join(lines) + "\n"


class _Space:
    """Where a number of GPUs and an efficiency are in the picture."""

    def __init__(self, dots: Sequence[Dot]) -> None:
        self.dots = sorted(dots, key=lambda dot: dot.gpus)
        self.counts = sorted({dot.gpus for dot in dots})
        lowest = min(dot.efficiency for dot in dots)
        highest = max(1.0, *(dot.efficiency for dot in dots))
        self.low = math.floor(min(lowest, 1 - 2 * STEP) / STEP) * STEP
        self.high = math.ceil(round(highest / STEP, 6)) * STEP

    def x(self, gpus: int) -> float:
        first, last = math.log2(self.counts[0]), math.log2(self.counts[-1])
        share = (math.log2(gpus) - first) / (last - first) if last > first else 0.5
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def y(self, efficiency: float) -> float:
        share = (efficiency - self.low) / (self.high - self.low)
        return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)

    def grid(self) -> Iterator[str]:
        for number in range(round((self.high - self.low) / STEP) + 1):
            level = self.low + number * STEP
            y, ideal = self.y(level), abs(level - 1) < STEP / 2
            stroke = f'stroke="{COLOURS["ideal"]}" stroke-dasharray="6 4"' if ideal else 'stroke="#deded8"'
            yield f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}" {stroke}/>'
            text = f"{100 * level:.0f} %"
            yield f'<text x="{LEFT - 8}" y="{y + 4:g}" text-anchor="end" fill="#585d64">{text}</text>'
        for count in self.counts:
            place = f'x="{self.x(count)}" y="{HEIGHT - BOTTOM + 20}"'
            yield f'<text {place} text-anchor="middle" fill="#585d64">{count:,}</text>'
        middle = (LEFT + WIDTH - RIGHT) // 2
        yield f'<text x="{middle}" y="{HEIGHT - 22}" text-anchor="middle" fill="#585d64">GPUs</text>'

    def curve(self) -> Iterator[str]:
        points = [(self.x(dot.gpus), self.y(dot.efficiency)) for dot in self.dots if dot.kind == "predicted"]
        text = " ".join(f"{x},{y}" for x, y in points)
        yield f'<polyline points="{text}" fill="none" stroke="{COLOURS["predicted"]}" stroke-width="2"/>'

    def marks(self) -> Iterator[str]:
        for dot in self.dots:
            words = f"{dot.kind}: {dot.gpus:,} GPUs, {100 * dot.efficiency:.1f} % of the ideal"
            yield _mark(dot.kind, self.x(dot.gpus), self.y(dot.efficiency), words)


def _mark(kind: Kind, x: float, y: float, words: str) -> str:
    """A ring is predicted, a filled circle measured, a square published."""
    colour, title = COLOURS[kind], f"<title>{escape(words)}</title>"
    if kind == "published":
        return f'<rect x="{x - 5:g}" y="{y - 5:g}" width="10" height="10" fill="{colour}">{title}</rect>'
    fill = colour if kind == "measured" else "#fcfcfa"
    circle = f'cx="{x}" cy="{y}" r="4.5" fill="{fill}" stroke="{colour}" stroke-width="2"'
    return f"<circle {circle}>{title}</circle>"


def _legend(dots: Sequence[Dot]) -> Iterator[str]:
    """Under the title: the kinds that are there; the dashed line is the ideal."""
    every: tuple[Kind, ...] = ("predicted", "measured", "published")
    kinds = [kind for kind in every if any(dot.kind == kind for dot in dots)]
    for number, kind in enumerate(kinds):
        x = LEFT + 6 + 110 * number
        yield _mark(kind, x, 40, kind)
        yield f'<text x="{x + 12}" y="44" fill="#1b1d20">{kind}</text>'
    x = LEFT + 110 * len(kinds)
    yield f'<line x1="{x}" x2="{x + 24}" y1="40" y2="40" stroke="{COLOURS["ideal"]}" stroke-dasharray="6 4"/>'
    yield f'<text x="{x + 32}" y="44" fill="#1b1d20">ideal</text>'
