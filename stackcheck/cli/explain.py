"""The verbs about compatibility rules: explain, compat. In: a combination. Out: rules with sources."""

from collections.abc import Iterator, Mapping
from typing import Annotated

import typer

from stackcheck.cli import options as opt
from stackcheck.cli.output import counted, print_json
from stackcheck.errors import CombinationError, ConfigurationError
from stackcheck.matrix.explain import Explanation

app = opt.new_app()


@app.command()
def explain(
    question: Annotated[
        list[str], opt.argument("STACK|AXIS=VALUE", "A stack id, or axes such as rocm=7.2 torch=2.6.0.")
    ],
    *,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Show why a combination is allowed or refused: rule, reason, source; exit 11 if it is not allowed."""
    from stackcheck.matrix import compat, expand, known_issues, matrix
    from stackcheck.matrix import explain as explaining
    from stackcheck.matrix.explain import parse_question

    rules, found = (
        compat.load_rules(root / "images" / "compat.yaml"),
        matrix.load_matrix(root / "matrix.yaml"),
    )
    issues = known_issues.load_known_issues(root / "images" / "known-issues.yaml")
    answer = explaining.explain_stack(question[0], found, rules, issues) if len(question) == 1 else None
    if answer is None:
        ids = (cell.id for cell in expand.candidates(found))
        answer = explaining.explain(parse_question(question, rules, ids), rules, found, issues)
    if as_json:
        print_json(_document(answer))
    else:
        print("\n".join(_lines(answer)))
    answered = answer.judgement.answer
    if answered != "allowed" and not (answered == "unknown" and answer.experimental):
        raise typer.Exit(CombinationError.exit_code)


def _document(answer: Explanation) -> dict[str, object]:
    judgement = answer.judgement
    return {
        "allowed": judgement.answer == "allowed",
        "answer": judgement.answer,
        "asked": dict(answer.asked),
        "rules": [
            {
                "id": finding.rule.id,
                "holds": finding.holds,
                "unknown": finding.rule.unknown and not finding.holds,
                "because": finding.rule.because,
                "source": finding.rule.source,
            }
            for finding in judgement.findings
        ],
        "nearest": [dict(near) for near in answer.nearest],
        "stacks": list(answer.stacks),
        "excluded": dict(answer.excluded),
        "known_issues": [issue.as_json() for issue in answer.known_issues],
        "experimental": answer.experimental,
        "environment": [
            {
                "name": one.name,
                "value": value,
                "values": list(one.values),
                "where": one.where,
                "because": one.because,
                "source": one.source,
            }
            for one, value in answer.environment
        ],
        "names": [name.model_dump() for name in answer.names],
    }


def _lines(answer: Explanation) -> Iterator[str]:
    judgement = answer.judgement
    yield f"{_texts(judgement.combination)}: {judgement.answer}"
    if answer.experimental and judgement.answer == "unknown":
        yield "  experimental: the matrix accepts an unknown combination, and the certificate says so"
    for finding in judgement.findings:
        # Of an allowed combination hide the catch-all rules (every value is listed); else hide what holds.
        if finding.holds if judgement.answer != "allowed" else finding.rule.closing:
            continue
        mark = "holds" if finding.holds else "unknown" if finding.rule.unknown else "broken"
        yield f"  {mark}  {finding.rule.id}: {finding.rule.because}\n         {finding.rule.source}"
    refused = {rule.id for rule in judgement.broken}
    for issue in answer.known_issues:
        if issue.id in refused:
            continue
        shown = f"fails {', '.join(issue.checks)}" if issue.checks else "no check has to show it"
        yield f"  known issue  {issue.id} ({issue.severity}): {issue.symptom}"
        yield f"         {issue.issue}; {issue.fix}; {shown}"
    for near in answer.nearest:
        changed = {axis: value for axis, value in near.items() if answer.asked.get(axis) != value}
        yield f"  allowed with  {_texts(changed)}"
    for name in answer.stacks:
        yield f"  in the matrix  {name}"
    for name, because in answer.excluded.items():
        yield f"  left out of the matrix  {name}: {because}"
    yield from _environment(answer)


def _environment(answer: Explanation) -> Iterator[str]:
    """The variables of a stack: what its image sets, what is left to a job, and other names."""
    for one, value in answer.environment:
        left = "an image that needs it sets it" if one.where == "image" else "left to the job"
        shown = (
            f"{one.name}={value}  set in the image" if value else f"{one.name}={'|'.join(one.values)}  {left}"
        )
        yield f"  variable  {shown}: {one.because}\n         {one.source}"
    for name in answer.names:
        yield f"  called  {name.nvidia} -> {name.amd}: {name.note}\n         {name.source}"


def _texts(combination: Mapping[str, str]) -> str:
    return " ".join(f"{axis}={value}" for axis, value in combination.items())


@app.command()
def compat(
    action: Annotated[str, opt.argument("check", "The only action.")] = "check",
    *,
    as_json: opt.AsJson = False,
    root: opt.Root = opt.HERE,
) -> None:
    """Check the compatibility rules for contradictions."""
    from stackcheck.matrix import compat as rules_of
    from stackcheck.matrix.compat import contradictions

    if action != "check":
        raise ConfigurationError(
            "no such action", got=action, expected="check", next_step="stackcheck compat check"
        )
    rules = rules_of.load_rules(root / "images" / "compat.yaml")
    pairs = contradictions(rules)
    if as_json:
        print_json({"rules": len(rules), "contradictions": [[a.id, b.id, axis] for a, b, axis in pairs]})
    if pairs:
        lines = [f"{a.id} and {b.id} require different values of {axis}" for a, b, axis in pairs]
        raise ConfigurationError(
            "\n".join(lines),
            where="images/compat.yaml",
            next_step="correct one rule of each pair, then run: stackcheck compat check",
        )
    if not as_json:
        print(f"{counted(len(rules), 'rule')} without a contradiction")
