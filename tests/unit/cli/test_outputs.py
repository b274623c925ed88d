"""What a verb prints is true of the verb itself: options, numbers, exit codes, names."""

import ast
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer._click import Command, Parameter

from kept_runs import GEMM, PASSED, body
from small_checkout import ROOT, call
from stackcheck import cli
from stackcheck.cli.output import counted
from stackcheck.history.history import open_history
from stackcheck.matrix import resolve

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

Capsys = pytest.CaptureFixture[str]
RANDOM = random.Random(34)
IDS = [stack.id for stack in resolve.load_stacks(ROOT)]


def commands() -> Iterator[tuple[str, Command]]:
    """Each verb, and the verbs below it, with its words."""
    main = typer.main.get_group(cli.app)
    context = typer.Context(main)
    for verb in cli.VERBS:
        command = main.get_command(context, verb)
        assert command
        yield verb, command
        yield from ((f"{verb} {name}", below) for name, below in getattr(command, "commands", {}).items())


COMMANDS = dict(commands())


def parameters(words: str) -> list[Parameter]:
    command = COMMANDS[words]
    return list(command.get_params(typer.Context(command)))


def takes(words: str, option: str) -> bool:
    return any(option in parameter.opts for parameter in parameters(words))


@pytest.mark.parametrize("words", COMMANDS)
def test_help_names_no_option_that_the_verb_does_not_have(words: str, capsys: Capsys) -> None:
    text = re.sub(r"-\n +", "-", call(capsys, *words.split(), "--help").out)  # a word over two lines
    # A command that the help proposes, `stackcheck key --policy`, has options of its own.
    own = re.sub(r"`?stackcheck [a-z]+[^`\n]*`?", "", text)
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", own):
        assert option == "--help" or takes(words, option), option


TAKE_A_STACK = [
    words
    for words in COMMANDS
    if words not in {"judge", "fleet run", "fleet judge", "fleet node"}
    and any(
        parameter.param_type_name == "argument" and re.search("STACK|SELECTOR", str(parameter.metavar))
        for parameter in parameters(words)
    )
]


# What these verbs ask for before they look at the stack.
NEEDS = {
    "base": ("--from-host",),
    "wheelhouse": ("folder", "--from-environment", sys.executable),
    "mirror": ("--print",),
}


def wrong_id() -> tuple[str, str]:
    """A stack id with one letter changed, and the id."""
    name = RANDOM.choice(IDS)
    at = RANDOM.randrange(len(name))
    wrong = name[:at] + "x" + name[at + 1 :]
    return (wrong, name) if wrong not in IDS else wrong_id()


@pytest.mark.usefixtures("small_checkout", "fake_engine")
@pytest.mark.parametrize("words", TAKE_A_STACK)
def test_a_wrong_stack_id_names_the_likely_one(words: str, capsys: Capsys) -> None:
    wrong, right = wrong_id()
    done = call(capsys, *words.split(), *NEEDS.get(words, ()), wrong)
    assert done.code in {2, 3}
    assert right in done.err.partition("expected: did you mean ")[2].partition("\n")[0]


@pytest.mark.parametrize("part", sorted({part for name in IDS for part in name.split("-")})[::4])
def test_a_part_of_a_stack_id_names_those_that_have_it(part: str, capsys: Capsys) -> None:
    done = call(capsys, "list", part, "--root", ROOT)
    assert done.code == 3
    named = done.err.partition("expected: did you mean ")[2].partition("?")[0].split(" or ")
    assert all(name in IDS and part in name for name in named)


def test_a_number_goes_with_its_noun() -> None:
    assert [counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "stackcheck" / "cli").glob("*.py")), ids=lambda path: path.stem
)
def test_no_length_stands_before_a_plural(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for number, after in zip(getattr(node, "values", ()), getattr(node, "values", ())[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and ast.unparse(number.value).startswith("len("):
                assert not re.match(r" [a-z]+s\b", str(getattr(after, "value", ""))), ast.unparse(node)


def test_a_dry_run_of_bisect_shows_no_python(capsys: Capsys) -> None:
    runtimes = [name.partition("-")[0].rstrip("0123456789.") for name in IDS]
    pairs = [
        (a, b)
        for a, one in zip(IDS, runtimes, strict=True)
        for b, other in zip(IDS, runtimes, strict=True)
        if one == other and a != b
    ]
    codes = []
    for good, bad in RANDOM.sample(pairs, 8):
        done = call(
            capsys, "bisect", "--good", good, "--bad", bad, "--check", GEMM, "--dry-run", "--root", ROOT
        )
        codes.append(done.code)
        assert not re.search(r"[(){}\[\]']|None|\.\.\.", done.out)
    assert 0 in codes


def test_a_passed_run_has_no_failed_check_in_the_list(small_checkout: Path, capsys: Capsys) -> None:
    waived = PASSED | {"failed": [GEMM], "warned": [GEMM]}
    open_history(small_checkout).append(body(0), waived, None, source="test")
    (run,) = json.loads(call(capsys, "history", "--json").out)
    assert run["waived"] == [GEMM]
    assert GEMM not in call(capsys, "history").out


def is_path(parameter: Parameter) -> bool:
    return "Path" in str(vars(parameter).get("type_descriptor"))


def is_read(parameter: Parameter) -> bool:
    return bool(vars(parameter)["type_descriptor"].parameter_info.exists)


# What a verb writes or makes; the signing key is made on first use, or refused by its own sentence. One names
# a program, which PATH may have.
WRITTEN = {"--out", "--output", "--record", "--to", "--into", "--state", "--key", "folder"}
WRITTEN |= {"--from-environment"}
PATHS = [(words, each) for words in COMMANDS for each in parameters(words) if is_path(each)]
READ = [(words, each.opts[0], each.param_type_name) for words, each in PATHS if is_read(each)]


def test_each_path_is_either_read_or_written() -> None:
    assert {each.opts[0] for _, each in PATHS if not is_read(each)} == WRITTEN
    assert {name for _, name, _ in READ}.isdisjoint(WRITTEN)


@pytest.mark.parametrize(("words", "name", "kind"), READ, ids=[f"{words} {name}" for words, name, _ in READ])
def test_a_path_to_read_that_is_not_there_is_named_with_its_option(
    words: str, name: str, kind: str, capsys: Capsys
) -> None:
    done = call(capsys, *words.split(), *([name] if kind == "option" else []), "/nowhere/at-all")
    assert done.code == (125 if words == "run" else 2)
    assert "/nowhere/at-all" in done.err
    assert (name if kind == "option" else "names a path that does not exist") in done.err
