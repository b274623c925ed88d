"""The page: one HTML file that needs nothing else. In: `Content`. Out: its bytes.

Every text from outside passes Jinja's escaping or `blocks.text_of`. As a second fence the page carries a
content security policy: no network at all, and no script but the ones whose digests it names.
"""

import base64
import datetime as dt
import functools
import hashlib
import math
import re
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from stackcheck import __version__, policy
from stackcheck.history.runs import Run, named
from stackcheck.report import blocks, speed, standing, verb_files, wall
from stackcheck.report.content import Content, Detail
from stackcheck.suite.judgement import NO_IMAGE

STYLES = ("uPlot.min.css", "page.css")
SCRIPTS = ("uPlot.iife.min.js", "shared.js", "answers.js", "plots.js", "speed.js", "curves.js", "runs.js")
FAILURES_SHOWN = 6


def render(content: Content) -> bytes:
    """The page."""
    licence = f"/*\n{_asset('uPlot.LICENSE')}\n*/\n"  # it asks to be in every copy
    scripts = [licence + _asset(SCRIPTS[0]), *(_asset(name) for name in SCRIPTS[1:])]
    template = _environment().get_template("page.html.j2")
    text = template.render(
        content=content,
        policy=_policy(scripts),
        style=Markup("\n".join(_asset(name) for name in STYLES)),  # noqa: S704  # files of this package
        scripts=[Markup(script) for script in scripts],  # noqa: S704  # files of this package
        blocks={
            name: Markup(text)  # noqa: S704  # text_of has escaped what could end the element
            for name, text in blocks.blocks(content).items()
        },
        words=standing.WORDS,
        wall=content.wall,
        wall_icons=wall.ICONS,
        late_s=int(wall.LATE.total_seconds()),
        version=__version__,
        shown=FAILURES_SHOWN,
        matrix_nodes=verb_files.SHOWN_LINKS,
        first=_first_group(content),
        offers=functools.partial(_offers, content),
        elsewhere=functools.partial(_elsewhere, content),
        cell=functools.partial(_cell, content),
        detail=functools.partial(_detail, content),
    )
    return text.encode()


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("stackcheck.report", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "moment": moment,
        "ordinal": ordinal,
        "many": many,
        "short": _short,
        "title_of": title_of,
        "age": wall.age,
    }
    environment.globals["waives"] = policy.names
    return environment


def _asset(name: str) -> str:
    return files("stackcheck.report").joinpath("assets", name).read_text(encoding="utf-8")


def _policy(scripts: list[str]) -> str:
    """The content security policy: nothing is loaded, and only these scripts run."""
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:"


def moment(time: dt.datetime) -> str:
    """A moment in UTC, as a reader reads it."""
    return f"{time.astimezone(dt.UTC):%d %b %Y, %H:%M} UTC"


def ordinal(number: int) -> str:
    """1st, 2nd, 3rd, 4th, 11th."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 if number % 100 not in {11, 12, 13} else 0, "th")
    return f"{number}{ending}"


def many(number: int, one: str, several: str | None = None) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else several or one + 's'}".replace(",", "\u202f")


def title_of(stack: str) -> str:
    """A stack's name for a title."""
    return re.sub(rf"^{re.escape(NO_IMAGE)}", f"{NO_IMAGE} (pytest alone)", named(stack))


def _first_group(content: Content) -> int:
    """The group that is shown first: of the machine that is shown first, the one nearest to its bounds."""

    def rank(group: speed.SpeedGroup) -> tuple[bool, float]:
        here = content.here is not None and group.device_model == content.here.device_model
        margins = [series.margin for series in group.series if series.margin is not None]
        return not here, min(margins, default=math.inf)

    numbered = enumerate(content.groups)
    return min(numbered, key=lambda pair: rank(pair[1]), default=(0, None))[0]


def _short(digest: str) -> str:
    return re.sub(r"^sha256:", "", digest)[: blocks.SHORT]


def _offers(content: Content, machine: standing.StandingMachine) -> dict[str, Any]:
    """The published images for a machine, by whether their certificates are valid now."""
    found = standing.offers(content.offered.images, machine)
    valid = [offer for offer in found if offer.image.current and offer.valid(content.made)]
    lost = [offer for offer in found if not offer.valid(content.made)]
    earlier = len(found) - len(valid) - len(lost)
    return {"valid": valid, "lost": lost, "earlier": earlier}


def _elsewhere(
    content: Content, machine: standing.StandingMachine
) -> list[tuple[standing.StandingMachine, int]]:
    """The machines that are most like this one, with how many images are certified for each."""
    counted = [
        (other, len(_offers(content, other)["valid"])) for other in content.machines if other != machine
    ]
    return sorted(
        [(other, count) for other, count in counted if count],
        key=lambda pair: (pair[0].device_model != machine.device_model, -pair[1], pair[0]),
    )[:3]


def _cell(content: Content, stack: str, machine: standing.StandingMachine) -> standing.StandingCell | None:
    found = (cell for cell in content.cells if (cell.stack, cell.machine) == (stack, machine))
    return next(found, None)


def _detail(content: Content, run: Run) -> Detail | None:
    return content.details.get(run.record)
