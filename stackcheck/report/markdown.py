"""The report for a README or a job summary. In: `Content`. Out: Markdown with the same three answers.

Names come from results that may not be trusted, so whatever Markdown or HTML could read as markup is escaped.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from stackcheck.report import standing
from stackcheck.report.content import Content
from stackcheck.report.page import many, moment, title_of
from stackcheck.report.speed import SpeedGroup, SpeedSeries
from stackcheck.report.verb_files import BAD

SIGNS: dict[standing.State, str] = {
    "certified": "✔",
    "passed": "○",
    "failed": "✘",
    "unfit": "△",
    "expired": "◷",
    "revoked": "⊘",
}
SIMULATED = " *(simulated)*"
NOTHING = "-"
FIGURES, REASONS = 8, 3
_BYTES = re.compile(r"\bbytes=(\d+)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>|#~&])")


def render(content: Content) -> str:
    """The report."""
    parts = (
        *(_head(content), _certified(content), _grid(content)),
        *(_night(content), _fleet(content), _speed(content)),
    )
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines) + "\n"


def escaped(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    printable = "".join(filter(str.isprintable, " ".join(text.split())))
    return _MARKUP.sub(r"\\\1", printable)


def _head(content: Content) -> Iterator[str]:
    yield "# Which stacks can be trusted"
    yield ""
    simulated = f", {content.simulated} of them simulated" if content.simulated else ""
    yield f"{moment(content.made)}, {many(len(content.runs), 'run')}{simulated}."
    for problem in content.problems:
        yield f"\nNot read: {escaped(problem)}"


def _certified(content: Content) -> Iterator[str]:
    yield "## What is certified"
    yield ""
    if content.offered.problem:
        yield f"**It is not known what is certified**: {escaped(content.offered.problem)}"
        return
    machines = sorted(content.machines, key=lambda machine: machine != content.here)
    if not machines:
        yield "Nothing is certified, and nothing ran yet."
    for machine in machines:
        yield from _machine(content, machine)
    for warning in content.warnings:
        yield f"- **{escaped(warning)}**"


def _machine(content: Content, machine: standing.StandingMachine) -> Iterator[str]:
    found = standing.offers(content.offered.images, machine)
    valid = [offer for offer in found if offer.image.current and offer.valid(content.made)]
    if not valid:
        yield f"- {escaped(machine.words())}: **no image is certified**"
    for offer in valid:
        remarks = [f"waived: {escaped(name)}" for name in offer.machine.warned]
        remarks += [f"known issue: {escaped(issue['symptom'])}" for issue in offer.image.known_issues]
        mark = SIMULATED if content.simulated_run(offer.machine.run_id) else ""
        yield (
            f"- {escaped(machine.words())}: **{escaped(offer.image.stack)}**{mark},"
            f" {many(offer.machine.device_count, 'device')} together, until {moment(offer.machine.expires)}"
            + "".join(f"\n  - {remark}" for remark in remarks)
        )


def _grid(content: Content) -> Iterator[str]:
    if not content.cells:
        return
    cells = {(cell.stack, cell.machine): cell for cell in content.cells}
    yield _row("Stack", *(escaped(machine.words()) for machine in content.machines))
    yield _row(*["---"] * (len(content.machines) + 1))
    for stack in sorted({cell.stack for cell in content.cells}):
        row = [_cell(cells.get((stack, machine))) for machine in content.machines]
        yield _row(escaped(title_of(stack)), *row)


def _cell(cell: standing.StandingCell | None) -> str:
    if cell is None:
        return "not run"
    return f"{SIGNS[cell.state]} {standing.WORDS[cell.state]}{SIMULATED if cell.simulated else ''}"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _night(content: Content) -> Iterator[str]:
    night = content.night
    yield "## What failed last night"
    yield ""
    if night.missing:
        newest = f"; the newest started {moment(night.newest)}" if night.newest else ""
        yield f"**No run in the last 24 hours**{newest}.\n"
    if night.runs:
        passed, failed, unfit = (night.counts.get(status, 0) for status in ("PASSED", "FAILED", "UNFIT"))
        total = many(len(night.runs), "run")
        yield f"{total}: {passed} passed, {failed} failed, {unfit} on an unfit machine.\n"
    for trouble in night.troubles:
        run = trouble.run
        detail = content.details.get(run.record)
        since = f", run {trouble.nights} in a row without a pass" if trouble.since else ", new"
        mark = SIMULATED if run.simulated else ""
        sign = SIGNS["failed" if run.status == "FAILED" else "unfit"]
        machine = f"{run.device_count} x {standing.machine_of(run).words()}"
        yield f"- {sign} **{escaped(title_of(run.stack))}** on {escaped(machine)}{mark}{since}"
        told = [": ".join((item.check, *item.reason[:1])) for item in detail.failures] if detail else []
        told = told or list(run.reasons)
        yield from (f"  - {escaped(line)}" for line in told[:REASONS])
        if len(told) > REASONS:
            yield f"  - and {len(told) - REASONS} more"
    if content.nightly:
        yield from (f"- **{escaped(text)}**" for text in content.nightly.warnings)
        yield from (
            f"- not run: {escaped(skip.tag)}: {escaped(skip.why)}" for skip in content.nightly.skipped
        )


def _fleet(content: Content) -> Iterator[str]:
    """The newest run of many nodes: its verdict, and who stands out."""
    if not content.fleets:
        return
    newest = content.fleets[0]
    yield "## Is the whole fleet fit?"
    yield ""
    words = ", ".join(f"{count} {status.lower()}" for status, count in newest.counts.items())
    total = many(len(newest.nodes), "node")
    name = escaped(title_of(newest.job.name))
    yield f"**{newest.status}**: {name} on {total} at {moment(newest.job.created)}: {words}.\n"
    for node in newest.nodes:
        if node.status in BAD:
            why = f": {escaped(node.reasons[0])}" if node.reasons else ""
            yield f"- {SIGNS['failed' if node.status == 'FAILED' else 'unfit']} **{escaped(node.node)}**{why}"
    for culprit in newest.links.culprits if newest.links else ():
        names = escaped(" - ".join(culprit.names))
        yield f"- {SIGNS['failed']} {culprit.kind} **{names}**: {escaped(culprit.because)}"
    for lost in newest.training.lost if newest.training else ():
        yield f"- {SIGNS['failed']} **{escaped(lost.node)}** was lost while training: {escaped(lost.because)}"


def _speed(content: Content) -> Iterator[str]:
    shown = [group for group in content.groups if any(series.margin is not None for series in group.series)]
    if shown:
        yield "## How fast each stack is"
    for group in shown:
        yield from _group(group)


def _group(group: SpeedGroup) -> Iterator[str]:
    judged = sorted(_judged(group.series), key=lambda series: series.margin or 0.0)
    mark = SIMULATED if group.runs[-1].simulated else ""
    yield f"\n<details><summary>{escaped(title_of(group.title))}{mark and ' (simulated)'}</summary>\n"
    yield _row("Figure", "Check", "Newest", "Better than its bound by", "Of the ceiling", "Since last month")
    yield _row("---", "---", "---:", "---:", "---:", "---:")
    for series in judged[:FIGURES]:
        yield _figure(series)
    if len(judged) > FIGURES:
        yield f"\nand {len(judged) - FIGURES} figures further from their bounds."
    yield "\n</details>"


def _judged(series: Iterable[SpeedSeries]) -> Sequence[SpeedSeries]:
    return [each for each in series if each.margin is not None]


def _figure(series: SpeedSeries) -> str:
    latest = series.latest
    ceiling = f"{latest / series.ceiling:.1%}" if latest is not None and series.ceiling else NOTHING
    change = NOTHING if series.change is None else f"{series.change:+.1%}"
    check = series.check.partition("::")[2] or series.check  # several checks may report one name
    return _row(
        escaped(_BYTES.sub(_message_size, series.name)),
        escaped(check),
        f"{latest:.4g} {escaped(series.unit)}",
        f"{series.margin:+.1%}",
        ceiling,
        change,
    )


def _message_size(found: re.Match[str]) -> str:
    """`256 MiB` of `bytes=268435456`, as the page writes it."""
    size, unit = float(found[1]), 0
    while size >= 1024 and unit + 1 < len(_UNITS):
        size, unit = size / 1024, unit + 1
    return f"{size:.4g} {_UNITS[unit]}"
