"""What a night says to people and machines. In: a finished `Plan`.
Out: one line for a chat, Markdown for a job summary, JUnit XML, JSON, and the exit code; `deliver` writes
them to `build/nightly/`. What was not run is in all of them, with its reason.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from stackcheck.errors import MachineUnfitError, NothingSelectedError
from stackcheck.files.atomic import file_error, write_atomically
from stackcheck.nightly.decide import GOOD
from stackcheck.nightly.state import Ended, Item, JudgedStep, Plan

WARNINGS_SHOWN = 3  # of one image, from earlier nights
# In the order in which a reader wants them: what is bad first.
WORDS = {
    "revoke": "revoked",
    "warn": "failed on a new configuration",
    "hold": "not settled",
    "error": "without a verdict",
    "nothing": "unfit machine",
    "renew": "renewed",
    "widen": "widened",
    "certify": "newly certified",
}


def exit_code(plan: Plan) -> int:
    """0 if everything that was due passed, or nothing was due; else the code of the worst outcome.

    6: an image failed. The error's own code: no verdict was reached. 9: the machine is unfit, or a reboot is
    pending. 3: the target has no image for this host, so the night proves nothing.
    """
    if plan.reboot_pending:
        return MachineUnfitError.exit_code
    codes = {item.ended.exit_code for item in plan.items if item.ended}
    if codes - {0, MachineUnfitError.exit_code}:
        return 6 if 6 in codes else min(codes - {0, MachineUnfitError.exit_code})
    if codes:
        return max(codes)
    if any(skip.for_here for skip in plan.skipped):
        return 0 if not any(skip.postponed for skip in plan.skipped) else NothingSelectedError.exit_code
    return NothingSelectedError.exit_code


def line(plan: Plan) -> str:
    """The night in one line, for a chat."""
    head = f"stackcheck nightly, {plan.fingerprint.words()} (node {plan.node}): "
    return one_line(head + ". ".join([_result(plan), *warnings(plan)]))


def warnings(plan: Plan) -> list[str]:
    """What somebody has to act on."""
    found = [_rollout(item, item.ended) for item in plan.items if item.ended and item.ended.rollout]
    found += [f"REVOKED {item.tag}: {item.ended.because}" for item in _with(plan, "revoke") if item.ended]
    others = _with(plan, "hold", "error", "nothing")
    found += [f"{item.tag}: {item.ended.because}" for item in others if item.ended]
    found += [
        f"{item.tag} failed once and passed twice: {', '.join(item.ended.failed)}"
        for item in _with(plan, "renew")
        if item.ended and item.ended.flaky
    ]
    found += [f"{item.tag}: far below its certificate: {text}" for item in plan.items for text in _slow(item)]
    found += [f"{item.tag}: {text}" for item in plan.items for run in item.runs[-1:] for text in _shown(run)]
    failed = [item for item in plan.items if item.ended and item.ended.action in {"revoke", "warn", "hold"}]
    if len(failed) > 1 and len(failed) == len(plan.items):
        found.append("every image failed on this host: look at the machine before you blame the images")
    if plan.reboot_pending:
        found.append(f"REBOOT PENDING, nothing was run: {plan.reboot_pending}")
    return [one_line(text) for text in dict.fromkeys([*found, *plan.notes])]


def markdown(plan: Plan) -> str:
    """The night as GitHub shows it in a job's summary."""
    lines = [f"## {line(plan).partition(': ')[0]}", "", _result(plan) + ".", ""]
    lines += [f"- **{_escaped(text)}**" for text in warnings(plan)]
    if plan.changes:
        lines += ["", f"Changed since the last night: {_escaped('; '.join(plan.changes))}."]
    lines += ["", "| image | outcome | why | failing checks |", "|---|---|---|---|"]
    for item in plan.items:
        ended = item.ended
        cells = (item.tag, WORDS[ended.action], ended.because, ", ".join(ended.failed)) if ended else ()
        lines.append(f"| {' | '.join(map(_escaped, cells or (item.tag, 'not finished', '', '')))} |")
    lines += [f"| {_escaped(skip.tag)} | not run | {_escaped(skip.why)} | |" for skip in plan.skipped]
    return "\n".join(lines) + "\n"


def junit(plan: Plan) -> bytes:
    """One test case for each image: passed, failed, error, or skipped with its reason."""
    suite = ET.Element("testsuite", name="stackcheck nightly", timestamp=plan.started.isoformat())
    counts: Counter[str] = Counter()
    for item in plan.items:
        case = ET.SubElement(suite, "testcase", classname=_model(plan), name=item.tag)
        if item.ended and (kind := _kind(item.ended)):
            counts[kind] += 1
            lines = (*item.ended.failed, *(reason for run in item.runs for reason in run.reasons))
            message = one_line(item.ended.because)
            ET.SubElement(case, kind, message=message).text = "\n".join(map(one_line, lines))
    for skip in plan.skipped:
        case = ET.SubElement(suite, "testcase", classname=_model(plan), name=skip.tag)
        ET.SubElement(case, "skipped", message=one_line(skip.why))
    if plan.reboot_pending:
        case = ET.SubElement(suite, "testcase", classname=_model(plan), name="host")
        ET.SubElement(case, "error", message=f"reboot pending: {plan.reboot_pending}")
        counts["error"] += 1
    suite.attrib.update(
        tests=str(len(suite)),
        failures=str(counts["failure"]),
        errors=str(counts["error"]),
        skipped=str(len(plan.skipped)),
    )
    return bytes(ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def as_json(plan: Plan) -> dict[str, Any]:
    """The night as one document; build/nightly/night.json has the same."""
    return {
        "schema": 1,
        "night": plan.night,
        "started": plan.started.isoformat(),
        "node": plan.node,
        "target": plan.target,
        "exit_code": exit_code(plan),
        "line": line(plan),
        "warnings": warnings(plan),
        "reboot_pending": plan.reboot_pending,
        "changes": list(plan.changes),
        "fingerprint": plan.fingerprint.model_dump(mode="json"),
        "images": [_image(item) for item in plan.items],
        "skipped": [skip.model_dump(mode="json") for skip in plan.skipped],
    }


def rows(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Image, outcome, reason: for the terminal."""
    for item in plan.items:
        words, why = "due", "; ".join(item.reasons)
        if item.ended:
            words, why = WORDS[item.ended.action], item.ended.because
        yield item.tag, words, one_line(why)
    for skip in plan.skipped:
        yield skip.tag, "not run", one_line(skip.why)


def _result(plan: Plan) -> str:
    counts: Counter[str] = Counter(item.ended.action for item in plan.items if item.ended)
    found = [f"{counts[action]} {words}" for action, words in WORDS.items() if counts[action]]
    waiting = sum(1 for item in plan.items if item.ended is None)
    found += [f"{waiting} due"] if waiting else []
    if not plan.items and not plan.reboot_pending:
        found.append(_silence(plan))
    found.append(f"{len(plan.skipped)} not run")
    return ", ".join(found)


def _silence(plan: Plan) -> str:
    """Why nothing was run."""
    if any(skip.postponed for skip in plan.skipped):
        return "NOTHING THAT IS DUE WAS SELECTED"
    here = any(skip.for_here for skip in plan.skipped)
    return "nothing was due" if here else "NO PUBLISHED IMAGE IS FOR THIS HOST"


def _rollout(item: Item, ended: Ended) -> str:
    what = " and ".join(ended.rollout)
    failed = ", ".join(ended.failed) or ended.because
    return f"DO NOT ROLL OUT {what}: {item.tag} fails {failed}"


def _with(plan: Plan, *actions: str) -> Iterator[Item]:
    return (item for item in plan.items if item.ended and item.ended.action in actions)


def _slow(item: Item) -> tuple[str, ...]:
    """What the last run measured far below the certificate, if it ended the night badly."""
    bad = item.ended is not None and item.ended.action not in GOOD
    return item.runs[-1].slow_words if bad and item.runs else ()


def _shown(run: JudgedStep) -> list[str]:
    """The first warnings that earlier nights give, and how many there are: a chat shows one line."""
    more = len(run.warnings) - WARNINGS_SHOWN
    return [
        *run.warnings[:WARNINGS_SHOWN],
        *([f"and {more} more figures, see night.json"] if more > 0 else []),
    ]


def _kind(ended: Ended) -> str:
    if ended.action in GOOD:
        return ""
    # An unfit machine is no skip here: many readers of JUnit show a skip in green.
    return "error" if ended.action in {"error", "nothing"} else "failure"


def _image(item: Item) -> dict[str, Any]:
    kept = item.model_dump(mode="json", include={"tag", "reference", "digest", "reasons", "standing", "runs"})
    return kept | {"outcome": item.ended.model_dump(mode="json") if item.ended else None}


def _model(plan: Plan) -> str:
    return f"{plan.fingerprint.device_model} x{len(plan.fingerprint.devices)}"


def _escaped(text: str) -> str:
    """Text that cannot break a table of GitHub's Markdown, nor become a link or a tag."""
    for character in "\\`*_<>[]|":
        text = text.replace(character, f"\\{character}")
    return one_line(text)


def one_line(text: str) -> str:
    """Text without line breaks and control characters: an image writes reasons, and may write anything."""
    return "".join(filter(str.isprintable, " ".join(text.split())))


GITHUB_SUMMARY = "GITHUB_STEP_SUMMARY"  # GitHub Actions names the file of a step's summary by it
NIGHT = "night.json"
JUNIT = "junit.xml"
SUMMARY = "summary.md"


def deliver(plan: Plan, folder: Path) -> None:
    """Write the outcome of a night to every place where somebody looks for it.

    Raises:
        FileError: A file cannot be written; the night itself is not lost, and the next call delivers it.
    """
    write_atomically(folder / NIGHT, (json.dumps(as_json(plan), indent=2).encode(),))
    write_atomically(folder / JUNIT, (junit(plan),))
    write_atomically(folder / SUMMARY, (markdown(plan).encode(),))
    named = os.environ.get(GITHUB_SUMMARY)
    if named:
        _append(Path(named), markdown(plan))


def _append(path: Path, text: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise file_error(error, path) from error
