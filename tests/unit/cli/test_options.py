"""One option is the same in every verb, and docs/reference/commands.md lists every command and exit code."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperOption

from small_checkout import ROOT
from stackcheck import cli, errors
from stackcheck.suite.judgement import judge_file

# What options.py promises: where to, how to build, how to report; what a verb does itself comes first.
ORDER = (
    *("--tier", "--gpu-vendor", "--force", "--max-age", "--device-model", "--driver", "--reason", "--output"),
    *("--to", "--key", "--sign-with", "--plain-http"),
    *("--wheelhouse", "--wheel-cache", "--mirrors", "--platform", "--no-cache"),
    *("--json", "--dry-run", "--root", "--help"),
)
# A verb that signs has the signing key, and one that verifies the public one; promote always needs a target.
# `test` runs a tier, and a verb that verifies accepts no lower one.
# `list`, `doctor` and `images` ask for a machine and its driver, `report` shows one host's.
# `verify` takes one driver, `history` and `find` a pattern; `judge` takes one stack, `history` a pattern,
# `nightly` several. `nightly --force` runs what is not due, and its images have to be published; `report`
# also shows others.
# `bisect --force` forgets what an earlier search found, and its tier only has to have the check.
# `policy` writes what a cluster demands, so its words are about nodes; `mirror --print` lists files.
# `render --check` looks, `history --check` and `bisect --check` name a check, `contribute --check` names a
# folder; its --to takes a bundle, and its --key signs or holds the keys that are trusted; `--all` lists
# equal metrics, or what does not fit.
TWO_MEANINGS = {
    "--all": 2,
    "--check": 4,
    "--key": 3,
    "--to": 3,
    "--tier": 4,
    "--driver": 3,
    "--machine": 2,
    "--stack": 3,
    "--force": 3,
    "--from": 2,
    "--print": 2,
    "--devices": 2,
    "--device-model": 3,
    "--max-age": 2,
}


def options(verb: str) -> Iterator[TyperOption]:
    group = typer.main.get_command(cli.app)
    context = typer.Context(group)
    command = group.get_command(context, verb)
    assert command
    yield from (option for option in command.get_params(context) if option.param_type_name == "option")


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_a_verb_lists_its_options_in_the_common_order(verb):
    names = [option.opts[0] for option in options(verb)]
    shared = [name for name in names if name in ORDER]
    assert shared == sorted(shared, key=ORDER.index)
    last = [name for name in names if name not in ORDER]
    assert names[: len(last)] == last, "a verb's own options come first"


def test_an_option_of_several_verbs_says_the_same_in_each():
    said: dict[str, set[str | None]] = {}
    for verb in cli.VERBS:
        for option in options(verb):
            said.setdefault(option.opts[0], set()).add(option.help)
    assert {name: len(texts) for name, texts in said.items() if len(texts) > 1} == TWO_MEANINGS


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_an_option_with_a_value_shows_its_default_or_is_required(verb):
    for option in options(verb):
        if not option.is_flag and not option.required:
            shows = isinstance(option.show_default, str) or (option.show_default and option.default)
            assert shows, f"{verb} {option.opts[0]}"


PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

`stackcheck COMMAND --help` says more of each. `tests/unit/cli/test_options.py` writes this page.
"""
OTHER_CODES = {
    0: "Done. `run` ends with the code of its program.",
    1: "A defect of stackcheck: please report it.",
    125: "`run`: an error of stackcheck, whichever it is; 126 and 127: the command cannot be started.",
    130: "Interrupted; the next run continues from what was done.",
}


def test_the_page_is_what_the_commands_say():
    page = HEAD + "".join(map(group, cli.GROUPS)) + exit_codes()
    if os.environ.get("STACKCHECK_WRITE_GOLDEN"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def group(name: str) -> str:
    rows = (f"| `{verb}` | {line} | {shape(verb)} |\n" for verb, (_, line) in cli.GROUPS[name].items())
    return f"\n## {name}\n\n| command | what it does | options |\n|---|---|---|\n" + "".join(rows)


def shape(verb: str) -> str:
    """The verbs below a verb, and its options."""
    main = typer.main.get_group(cli.app)
    context = typer.Context(main)
    command = main.get_command(context, verb)
    assert command
    found = [option.opts[0] for option in command.get_params(context) if option.param_type_name == "option"]
    below = [f"{verb} {name}" for name in getattr(command, "commands", {})]
    return " ".join(f"`{name}`" for name in (*below, *found) if name != "--help")


def exit_codes() -> str:
    kinds = [kind for kind in errors.StackcheckError.__subclasses__() if kind.__module__ == errors.__name__]
    codes = OTHER_CODES | {kind.exit_code: (kind.__doc__ or "").splitlines()[0] for kind in kinds}
    rows = (f"| {code} | {codes[code]} |\n" for code in sorted(codes))
    return "\n## Exit codes\n\n| code | meaning |\n|---|---|\n" + "".join(rows)


def test_a_run_with_other_thresholds_is_held_to_the_bounds_of_this_checkout(tmp_path):
    """Its own bounds differ by right, so they say nothing; its figures do."""
    document = json.loads((ROOT / "docs" / "results" / "suites-h100-x1-standard.json").read_text())
    path = tmp_path / "result.json"
    for check in document["checks"]:
        for metric in check["metrics"]:
            if metric["name"] == "copy_gb_per_s" and metric["verdict"] == "pass":
                metric |= {"value": 2600.0, "bound": 2402.0}  # over the run's bound, under the one here
    path.write_text(json.dumps(document))
    found = judge_file(path, ROOT, None)
    (reason,) = [reason for reason in found.verdict.reasons if "copy_gb_per_s" in reason]
    assert "copy_gb_per_s 2600.0 GB/s violates" in reason
    assert any(line.startswith("the thresholds: the run used others") for line in found.not_compared)
