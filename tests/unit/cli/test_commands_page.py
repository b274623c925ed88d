"""docs/reference/commands.md lists every command and exit code; STACKCHECK_WRITE_GOLDEN=1 writes it."""

import os
from pathlib import Path

import typer

from stackcheck import cli, errors

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "commands.md"
HEAD = """# Commands

`stackcheck COMMAND --help` says more of each. `tests/unit/cli/test_commands_page.py` writes this page.
"""
OTHER_CODES = {
    0: "Done. `run` ends with the code of its program.",
    1: "A defect of stackcheck: please report it.",
    125: "`run`: an error of stackcheck, whichever it is; 126 and 127: the command cannot be started.",
    130: "Interrupted; the next run continues from what was done.",
}


def test_the_page_is_what_the_commands_say() -> None:
    page = HEAD + "".join(map(group, cli.GROUPS)) + exit_codes()
    if os.environ.get("STACKCHECK_WRITE_GOLDEN"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page


def group(name: str) -> str:
    rows = (f"| `{verb}` | {line} | {options(verb)} |\n" for verb, (_, line) in cli.GROUPS[name].items())
    return f"\n## {name}\n\n| command | what it does | options |\n|---|---|---|\n" + "".join(rows)


def options(verb: str) -> str:
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
