"""The verb `judge`. In: a result.json of any run. Out: its verdict with every reason, and its exit code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stackcheck.cli import options as opt
from stackcheck.cli.output import print_facts, print_json
from stackcheck.errors import ChecksFailedError, MachineUnfitError
from stackcheck.matrix import resolve

if TYPE_CHECKING:
    from stackcheck.suite.judgement import Judgement

app = opt.new_app()

EXIT_CODES = {"PASSED": 0, "FAILED": ChecksFailedError.exit_code, "UNFIT": MachineUnfitError.exit_code}


@app.command("judge")
def judge_result(
    result: Annotated[Path, opt.argument("RESULT", "The result.json of a run.", exists=True)],
    *,
    stack: Annotated[
        str | None,
        opt.option(
            "--stack STACK", "The stack whose waivers, machines (tested_on) and declaration apply.", "none"
        ),
    ] = None,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Give this checkout's verdict on a result.json: exit 0 PASSED, 6 FAILED, 9 UNFIT. It signs nothing."""
    from stackcheck.suite.judgement import judge_file

    chosen = resolve.load_stack(root.resolve(), stack, "--stack") if stack else None
    found = judge_file(result, root.resolve(), chosen)
    if as_json:
        print_json(_document(result, found))
    else:
        _print(result, found)
    raise typer.Exit(EXIT_CODES[found.verdict.status])


def _document(path: Path, found: Judgement) -> dict[str, Any]:
    return {
        "result": str(path),
        "tier": found.result.tier,
        "certifies": found.certifies,
        "not_compared": list(found.not_compared),
        "next": _next(path, found),
        **found.verdict.as_json(),
    }


def _print(path: Path, found: Judgement) -> None:
    verdict, result = found.verdict, found.result
    models = sorted({device.model for device in result.host.devices})
    tested = "" if found.certifies else "; lower than the tier in the policy, so this run cannot be certified"
    print_facts(
        {
            "verdict": verdict.status,
            "machine": f"{' + '.join(models) or 'no device'} x{len(result.host.devices)}",
            "tier": f"{result.tier}{tested}",
            **({"driver": verdict.driver["says"]} if verdict.driver else {}),
            "checks": ", ".join(f"{count} {name}" for name, count in _counts(found).items() if count),
            "next": _next(path, found),
        }
    )
    for title, lines in (("reasons", verdict.reasons), ("not compared", found.not_compared)):
        if lines:
            print(f"{title}:")
            print("\n".join("  " + line.replace("\n", "\n    ") for line in lines))


def _counts(found: Judgement) -> dict[str, int]:
    verdict = found.verdict
    return {
        "passed": len({*verdict.passed} - {*verdict.guessed}),
        "failed": len({*verdict.failed} - {*verdict.unbounded, *verdict.guessed}),
        "no bound": len(verdict.unbounded),
        "beyond a guess": len(verdict.guessed),
        "skipped": len(verdict.skipped),
        "invalid": len(verdict.invalid),
        "waived": len(verdict.warned),
    }


def _next(path: Path, found: Judgement) -> str:
    """The command that follows from a verdict."""
    verdict, result = found.verdict, found.result
    if verdict.only_bounds or verdict.lacks_only_bounds:
        return f"stackcheck baseline {path} and the results of two more healthy runs"
    if verdict.status == "UNFIT" and verdict.guessed:
        return "take the step that each reason names last"
    if verdict.status == "UNFIT":
        return "run the suites again on a fit machine that the stack names"
    if verdict.status == "FAILED":
        return "fix what failed, then run the suites again"
    name = result.stack_id or "STACK"
    return f"stackcheck certify {name}" if found.certifies else f"stackcheck certify {name}, which runs all"
