"""A page of one run, for a person who only runs the suites. In: the content of result.json. Out: report.html.

One file with no script, which loads nothing. It shows what was measured; the verdict is the host's.
Every text is escaped: a check's reason can hold what an image printed.
"""

import html
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import timeline

TEMPLATE = Path(__file__).with_name("page.html")
NAME = "report.html"
BAD = {"failed": "✘ failed", "error": "✘ error", "invalid": "△ machine unfit"}
WORDS = {"passed": "✔ passed", "skipped": "- skipped", **BAD}
OPEN = 3  # the first failures are shown in full
REASON_LINES = 12  # more would push the figures off the first screens
BAR, WIDE = 160, 600
LEAST_SHOWN = 0.002  # of the wall time
Check = Mapping[str, Any]


def write(result: Mapping[str, Any], folder: Path, model: str, devices: int) -> Path:
    """Write the page beside result.json.

    Args:
        result: The content of result.json.
        folder: Where it lies.
        model: The device model.
        devices: How many devices the run used.

    Raises:
        OSError: The page cannot be written.
    """
    path = folder / NAME
    partial = path.with_suffix(".partial")
    partial.write_text(render(result, folder, model, devices), encoding="utf-8")
    partial.replace(path)
    return path


def render(result: Mapping[str, Any], folder: Path, model: str, devices: int) -> str:
    """The page."""
    checks: Sequence[Check] = result["checks"]
    bad = [check for check in checks if check["outcome"] in BAD]
    answer = _answer(result, bad)
    kind, mark = ("good", "✔") if answer.endswith("none failed.") else ("bad", "✘")
    every = _table("Checks", ("Check", "Outcome", "Seconds"), _rows(checks))
    return string.Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=_text(f"{answer} {model} x{devices}, {result['started'][:16]}"),
        answer=f'<span class="{kind}">{mark}</span> {_text(answer)}',
        next=_next(result, folder),
        facts=_facts(result, model, devices),
        failed=_failed(bad),
        figures=_figures(checks),
        evidence=_evidence(checks),
        skipped=_skipped(checks),
        checks=f"{_when(result)}<details><summary>All {len(checks)} checks</summary>{every}</details>",
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _answer(result: Mapping[str, Any], bad: Sequence[Check]) -> str:
    checks = result["checks"]
    if result["state"] != "finished":
        return f"The run did not end ({result['state']}): {len(checks)} checks reported."
    if bad:
        return f"{len(bad)} of {len(checks)} checks did not pass."
    passed = sum(check["outcome"] == "passed" for check in checks)
    return f"{passed} of {len(checks)} checks passed, none failed." if passed else "No check passed."


def _next(result: Mapping[str, Any], folder: Path) -> str:
    if result["image"]:  # stackcheck started the container, which has other paths
        return "This is what was measured. The verdict is in <code>verdict.json</code>, above this folder."
    command = f"<code>stackcheck judge {_text(folder / 'result.json')}</code>"
    return f"This is what was measured. The verdict, which knows what had to run: {command}"


def _facts(result: Mapping[str, Any], model: str, devices: int) -> str:
    host, image = result["host"], result["image"] or {}
    facts = {
        "devices": f"{devices} x {model}",
        "driver": host["driver"] or "none",
        "tier": result["tier"],
        "stack": result["stack_id"] or "none: pytest alone",
        "image": image.get("reference") or "none",
        "started": _moment(result["started"]),
        "ended": _moment(result["finished"]) if result["finished"] else "never",
        "kernel": host["kernel"],
        "software": ", ".join(f"{name} {version}" for name, version in result["software"].items()),
    }
    return "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts.items())


def _moment(text: str) -> str:
    """A time of result.json to the second; it is UTC there."""
    return f"{text[:10]} {text[11:19]} UTC"


def _failed(bad: Sequence[Check]) -> str:
    if not bad:
        return ""
    parts = [_failure(check, is_open=number < OPEN) for number, check in enumerate(bad)]
    return f"<h2>What did not pass, and why</h2>{''.join(parts)}"


def _failure(check: Check, *, is_open: bool) -> str:
    lines = (check["reason"] or "no reason given").splitlines()
    more = [f"… {len(lines) - REASON_LINES} more lines in result.json"] if len(lines) > REASON_LINES else []
    proves = f'<p class="soft">Proves: {_text(check["doc"])}</p>' if check["doc"] else ""
    kind = "odd" if check["outcome"] == "invalid" else "bad"
    return (
        f'<details{" open" if is_open else ""}><summary><span class="{kind}">{BAD[check["outcome"]]}</span>'
        f" <code>{_text(check['id'])}</code></summary>{proves}"
        f"<pre>{_text(chr(10).join(lines[:REASON_LINES] + more))}</pre></details>"
    )


def _table(title: str, columns: Iterable[str], rows: Iterable[str]) -> str:
    body = "".join(rows)
    if not body:
        return ""
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in columns)
    return (
        f'<h2>{_text(title)}</h2><div class="scroll" role="region" tabindex="0" aria-label="{_text(title)}">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _figures(checks: Iterable[Check]) -> str:
    rows = (
        _figure(check, metric)
        for check in checks
        for metric in check["metrics"]
        if metric["bound"] is not None and metric["value"] is not None
    )
    columns = ("Figure", "Value", "Against bound and ceiling", "Bound", "Ceiling")
    return _table("Figures with a bound", columns, rows)


def _figure(check: Check, metric: Mapping[str, Any]) -> str:
    bad = ' <span class="bad">✘ outside</span>' if metric["verdict"] == "fail" else ""
    sign = "≥" if metric["direction"] == "min" else "≤"
    ceiling = "-" if metric["ceiling"] is None else f"{metric['ceiling']:.4g}"
    return (
        f'<tr><th scope="row">{_text(metric["name"])}<br><span class="soft">{_text(check["id"])}</span></th>'
        f'<td class="number">{metric["value"]:.4g} {_text(metric["unit"])}{bad}</td><td>{_bar(metric)}</td>'
        f'<td class="number">{sign} {metric["bound"]:.4g}</td><td class="number">{ceiling}</td></tr>'
    )


def _bar(metric: Mapping[str, Any]) -> str:
    value, bound = max(0.0, metric["value"]), max(0.0, metric["bound"])
    end = max(metric["ceiling"] or 0.0, bound * 1.1, value * 1.05) or 1.0
    kind = "out" if metric["verdict"] == "fail" else "fill"
    return (
        f'<svg viewBox="0 0 {BAR} 18" aria-hidden="true">'
        f'<rect class="track" y="4" width="{BAR}" height="10"/>'
        f'<rect class="{kind}" y="4" width="{BAR * value / end:.1f}" height="10"/>'
        f'<path class="tick" d="M{BAR * bound / end:.1f} 0V18"/></svg>'
    )


def _evidence(checks: Iterable[Check]) -> str:
    watched = ((check, check["evidence"]["after"].get("during")) for check in checks)
    rows = (_reading(check, during) for check, during in watched if during)
    columns = ("Check", "Seconds", "Clock, median (MHz)", "Power, highest (W)", "°C, highest", "Slowed by")
    return _table("The machine meanwhile", columns, rows)


def _reading(check: Check, during: Mapping[str, Any]) -> str:
    numbers = ("clock_mhz_median", "power_w_max", "temperature_c_max")
    cells = "".join(f'<td class="number">{_text(_shown(during.get(name)))}</td>' for name in numbers)
    throttle = ", ".join(map(str, during.get("throttle") or ())) or "nothing"
    seconds = f'<td class="number">{check["seconds"]:.1f}</td>'
    return f'<tr><th scope="row">{_text(check["id"])}</th>{seconds}{cells}<td>{_text(throttle)}</td></tr>'


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else "-"


def _skipped(checks: Iterable[Check]) -> str:
    reasons = Counter(check["reason"] for check in checks if check["outcome"] == "skipped")
    rows = (
        f'<tr><td class="number">{count}</td><td>{_text(reason)}</td></tr>'
        for reason, count in reasons.most_common()
    )
    return _table("Skipped", ("Checks", "Reason"), rows)


def _when(result: Mapping[str, Any]) -> str:
    """When each check waited and ran. Those too short to see are left out."""
    found = timeline.spans(result)
    end = max((span.ended for span in found), default=0.0) or 1.0
    seen = [span for span in found if span.ended - span.began > end * LEAST_SHOWN]
    limiting = {span.name for span in timeline.chain(found)}
    rows = (_span(span, WIDE / end, bold=span.name in limiting) for span in seen)
    table = _table("When each check waited and ran", ("Check", "Waited", "Ran", f"0 to {end:.0f} s"), rows)
    return f"<details><summary>{_text(timeline.words(result))}</summary>{table}</details>"


def _span(span: timeline.Span, scale: float, *, bold: bool) -> str:
    kind = "out" if bold else "fill"
    name = f"{_text(span.name)}{' (limits the run)' if bold else ''}"
    return (
        f'<tr><th scope="row">{name}</th><td class="number">{span.ran - span.began:.1f}</td>'
        f'<td class="number">{span.ended - span.ran:.1f}</td><td><svg viewBox="0 0 {WIDE} 10" '
        f'width="{WIDE}" height="10" aria-hidden="true"><rect class="track" x="{span.began * scale:.1f}" '
        f'width="{(span.ran - span.began) * scale:.1f}" height="10"/><rect class="{kind}" '
        f'x="{span.ran * scale:.1f}" width="{(span.ended - span.ran) * scale:.1f}" height="10"/></svg></td>'
        "</tr>"
    )


def _rows(checks: Iterable[Check]) -> Iterator[str]:
    for check in checks:
        yield (
            f'<tr><th scope="row">{_text(check["id"])}</th><td>{WORDS[check["outcome"]]}</td>'
            f'<td class="number">{check["seconds"]:.2f}</td></tr>'
        )
