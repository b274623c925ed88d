"""What people expect of a command line: a version, near words, next steps, JSON errors, a search upwards."""

import json
import random
import string
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import typer

from small_checkout import ROOT, call
from stackcheck import __version__, cli
from stackcheck.cli import output
from stackcheck.errors import ConfigurationError, StackcheckError
from stackcheck.files import checkout

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

RANDOM = random.Random(34)


def options(verb: str) -> list[str]:
    main = typer.main.get_group(cli.app)
    context = typer.Context(main)
    command = main.get_command(context, verb)
    assert command
    return [name for parameter in command.get_params(context) for name in parameter.opts]


WITH_JSON = [verb for verb in cli.VERBS if "--json" in options(verb)]


def kinds(base: type[StackcheckError] = StackcheckError) -> Iterator[type[StackcheckError]]:
    yield base
    for kind in base.__subclasses__():
        yield from kinds(kind)


def typo(word: str) -> str:
    """The word with one letter lost, doubled or changed; of no verb."""
    while True:
        at = RANDOM.randrange(len(word))
        put = RANDOM.choice(["", word[at] * 2, RANDOM.choice(string.ascii_lowercase)])
        wrong = word[:at] + put + word[at + 1 :]
        if wrong not in cli.VERBS and wrong:
            return wrong


def test_the_version_is_that_of_the_package(capsys):
    done = call(capsys, "--version")
    assert (done.code, done.out) == (0, f"stackcheck {__version__}\n")


@pytest.mark.parametrize("verb", ["", *cli.VERBS])
def test_h_is_help(verb, capsys):
    words = [verb] if verb else []
    short, long = call(capsys, *words, "-h"), call(capsys, *words, "--help")
    assert short.code == 0
    assert short.out == long.out


@pytest.mark.parametrize("columns", [60, 80, 100, 300])
def test_help_is_as_wide_as_the_terminal_and_no_wider_than_can_be_read(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    widths = [len(line) for line in call(capsys, "verify", "--help").out.splitlines()]
    assert max(widths) <= min(columns, cli.WIDEST)
    assert max(widths) > min(columns, cli.WIDEST) * 0.8


@pytest.mark.parametrize("verb", [verb for verb in cli.VERBS if len(verb) > 4])
def test_a_verb_with_one_wrong_letter_names_the_verb(verb, capsys):
    done = call(capsys, typo(verb))
    assert done.code == 2
    assert verb in done.err.partition("expected: ")[2].partition("\n")[0]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_wrong_option_has_a_next_step(verb, capsys):
    done = call(capsys, verb, "--no-such-option")
    assert done.code == (125 if verb == "run" else 2)
    assert f"next: stackcheck {verb} --help" in done.err


def raising(kind: type[StackcheckError]) -> StackcheckError:
    """An error of a kind without a next step of its own, whatever its constructor asks for."""
    error = kind.__new__(kind)
    StackcheckError.__init__(error, "it went wrong\x1b[2J")
    return error


@pytest.mark.parametrize("verb", WITH_JSON)
def test_every_error_of_every_verb_is_json_and_has_a_next_step(verb, capsys, monkeypatch):
    for kind in kinds():
        monkeypatch.setattr(cli.VerbGroup, "resolve_command", mock.Mock(side_effect=raising(kind)))
        done = call(capsys, verb, "--json")
        assert done.code == kind.exit_code
        told = json.loads(done.out)["error"]
        assert told["what"] == "it went wrong\x1b[2J"
        assert told["exit_code"] == done.code
        assert told["next"]
        assert f"  next: {told['next']}" in done.err
        assert "\x1b" not in done.out + done.err


def test_a_verb_that_printed_its_document_prints_no_second_one(capsys, monkeypatch):
    def fail(*_arguments: object, **_options: object) -> None:
        output.print_json({"found": []})
        raise ConfigurationError("and yet")

    monkeypatch.setattr(cli.VerbGroup, "resolve_command", fail)
    assert json.loads(call(capsys, "find", "--json").out) == {"found": []}


def test_a_command_of_run_may_have_json_of_its_own(capsys):
    assert not call(capsys, "run", "oci:nowhere:x", "--", "tool", "--json").out


@pytest.mark.parametrize("below", ["docs", "images/cpu/parts", "build/a b"])
def test_a_verb_works_below_the_checkout(below, small_checkout, capsys, monkeypatch):
    here = call(capsys, "list", "--json")
    folder = small_checkout / below
    folder.mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(folder)
    assert call(capsys, "list", "--json") == here
    assert here.code == 0


@pytest.fixture
def nowhere(tmp_path, monkeypatch) -> Path:
    """An empty folder, far from every checkout."""
    folder = tmp_path / "empty"
    folder.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("verb", sorted({"history", "compat", "list", "explain", "report"}))
def test_outside_a_checkout_state_is_in_the_users_data_folder(verb, nowhere, capsys):
    words = {"explain": ["rocm=7.2.1", "torch=2.13.0", "arch=gfx950"]}.get(verb, [])
    assert call(capsys, verb, *words).code == 0
    assert not list(nowhere.iterdir())
    assert (nowhere.parent / "data" / "stackcheck" / "matrix.yaml").is_file()


@pytest.mark.parametrize("verb", ["lock", "render", "prove"])
def test_a_verb_that_writes_a_checkout_asks_for_one(verb, nowhere, capsys):
    done = call(capsys, verb)
    assert done.code == 2
    assert "--root DIR" in done.err.partition("next: ")[2]
    assert not list(nowhere.iterdir())


@pytest.mark.usefixtures("nowhere")
def test_the_data_folder_follows_the_installed_version(monkeypatch):
    folder = checkout.users_own()
    (folder / "images").unlink()
    (folder / "images").symlink_to("/an/older/version")
    assert checkout.users_own() == folder
    assert (folder / "images").resolve() == ROOT / "images"
    monkeypatch.setattr(checkout, "PACKAGE", folder / "build" / "lib")
    with pytest.raises(ConfigurationError, match="no matrix, suites and rules") as refused:
        checkout.users_own()
    assert "make wheel" in str(refused.value)
