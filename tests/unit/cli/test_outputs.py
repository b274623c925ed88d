"""What a verb prints is true of the verb: options, numbers, exit codes, names, tables of the history."""

import ast
import csv
import datetime as dt
import json
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer._click import Command, Parameter

import result_files
from kept_runs import GEMM, PASSED, body, failed
from small_checkout import ROOT, call
from small_dist import KEY, release
from small_images import STACK_ID
from stackcheck import cli
from stackcheck.certificate import keys
from stackcheck.cli import options, output
from stackcheck.cli.history import sparkline
from stackcheck.cli.output import counted
from stackcheck.history import export
from stackcheck.history.history import open_history
from stackcheck.matrix import resolve

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")

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
def test_help_names_no_option_that_the_verb_does_not_have(words, capsys):
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
def test_a_wrong_stack_id_names_the_likely_one(words, capsys):
    wrong, right = wrong_id()
    done = call(capsys, *words.split(), *NEEDS.get(words, ()), wrong)
    assert done.code in {2, 3}
    assert right in done.err.partition("expected: did you mean ")[2].partition("\n")[0]


@pytest.mark.parametrize("part", sorted({part for name in IDS for part in name.split("-")})[::4])
def test_a_part_of_a_stack_id_names_those_that_have_it(part, capsys):
    done = call(capsys, "list", part, "--root", ROOT)
    assert done.code == 3
    named = done.err.partition("expected: did you mean ")[2].partition("?")[0].split(" or ")
    assert all(name in IDS and part in name for name in named)


def test_a_number_goes_with_its_noun():
    assert [counted(number, "image") for number in (0, 1, 2)] == ["0 images", "1 image", "2 images"]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "stackcheck" / "cli").glob("*.py")), ids=lambda path: path.stem
)
def test_no_length_stands_before_a_plural(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for number, after in zip(getattr(node, "values", ()), getattr(node, "values", ())[1:], strict=False):
            if isinstance(number, ast.FormattedValue) and ast.unparse(number.value).startswith("len("):
                assert not re.match(r" [a-z]+s\b", str(getattr(after, "value", ""))), ast.unparse(node)


def test_a_dry_run_of_bisect_shows_no_python(capsys):
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


def test_a_passed_run_has_no_failed_check_in_the_list(small_checkout, capsys):
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


def test_each_path_is_either_read_or_written():
    assert {each.opts[0] for _, each in PATHS if not is_read(each)} == WRITTEN
    assert {name for _, name, _ in READ}.isdisjoint(WRITTEN)


@pytest.mark.parametrize(("words", "name", "kind"), READ, ids=[f"{words} {name}" for words, name, _ in READ])
def test_a_path_to_read_that_is_not_there_is_named_with_its_option(words, name, kind, capsys):
    done = call(capsys, *words.split(), *([name] if kind == "option" else []), "/nowhere/at-all")
    assert done.code == (125 if words == "run" else 2)
    assert "/nowhere/at-all" in done.err
    assert (name if kind == "option" else "names a path that does not exist") in done.err


@pytest.fixture
def kept(small_checkout: Path) -> Path:
    """A history of ten nights; the fourth one failed."""
    history = open_history(small_checkout)
    for number in range(10):
        history.append(body(number), failed(GEMM) if number == 3 else PASSED, None, source="test")
    return small_checkout


def test_yesterday_begins_at_midnight_utc():
    now = dt.datetime.now(dt.UTC)
    found = options.since("yesterday", "--since")
    assert (found.hour, found.minute, found.second) == (0, 0, 0)
    assert dt.timedelta(days=1) <= now - found < dt.timedelta(days=2, seconds=5)
    assert options.since("today", "--since") - found == dt.timedelta(days=1)


@given(
    st.lists(st.tuples(*[st.text("abc é…", max_size=80)] * 4), max_size=5),
    st.integers(min_value=4 * output.LEAST + 3 * output.GAP, max_value=200),
)
def test_a_table_in_a_terminal_is_never_wider_than_it(rows, width):
    names = ("A", "B", "C", "KEPT")
    for row, cut in zip(rows, output.fitted(names, rows, width), strict=True):
        for cell, short in zip(row, cut, strict=True):
            assert short == cell or (short[-1] == "…" and cell.startswith(short[:-1]))
    made = output.fitted(names, rows, width)
    widths = [max(len(row[i]) for row in (names, *made)) for i in range(4)]
    assert sum(widths) + 3 * output.GAP <= width
    assert [row[3] for row in output.fitted(names, rows, width, keep="KEPT")] == [row[3] for row in rows]


def test_a_sparkline_has_one_character_a_value_up_to_its_width():
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▅▅"
    assert sparkline([]) == ""
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40


@pytest.mark.parametrize(("table", "rows"), [("metrics", 20), ("runs", 10)])
@pytest.mark.usefixtures("kept")
def test_the_same_rows_in_csv_and_parquet(capsys, tmp_path, table, rows):
    from pyarrow import parquet

    for name in ("t.csv", "t.parquet"):
        assert call(capsys, "history", "export", "--to", tmp_path / name, "--table", table).code == 0
    with (tmp_path / "t.csv").open() as file:
        lines = list(csv.DictReader(file))
    columns = parquet.read_table(tmp_path / "t.parquet").to_pylist()
    assert (len(lines), len(columns)) == (rows, rows)
    for line, row in zip(lines, columns, strict=True):
        assert line["record"] == row["record"]
        assert line["started"] == row["started"].isoformat()
        assert line["failed"] == "; ".join(row["failed"])
        if table == "metrics":
            assert float(line["value"]) == row["value"]
            assert [float(text) for text in line["repeats"].split("; ")] == row["repeats"]


@pytest.mark.parametrize("text", ['=HYPERLINK("x")', "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", ("=1", "b")])
def test_no_text_of_a_csv_file_is_a_formula_of_a_spreadsheet(text):
    """Numbers stay numbers, also those below zero."""
    assert str(export._text(text)).startswith("'")
    assert export._text(-1.5) == -1.5
    assert export._text("plain=1") == "plain=1"


@pytest.mark.usefixtures("kept")
def test_an_export_that_fails_leaves_no_half_file(capsys, tmp_path):
    (tmp_path / "t.csv").mkdir()
    assert call(capsys, "history", "export", "--to", tmp_path / "t.csv").code == 10
    assert [path.name for path in tmp_path.glob("*t.csv*")] == ["t.csv"]


@pytest.fixture
def public(tmp_path) -> str:
    path = tmp_path / "publisher.pub"
    path.write_bytes(keys.public_pem(KEY.public_key()))
    return str(path)


# Every key of `verify --json`, and its type: scripts read them.
FACTS: dict[str, type | tuple[type, ...]] = {
    "stack": (str, type(None)),
    "run": str,
    "digest": str,
    "device_model": str,
    "driver": (str, type(None)),
    "verified_at": str,
    "valid_until": str,
    "signed_by": list,
    "tier": str,
    "devices": int,
    "checks": dict,
    "bounds": dict,
    "static_only": list,
    "against": (dict, type(None)),
    "derived_from": (dict, type(None)),
    "next": str,
    "notes": list,
    "certificate": dict,
}


@pytest.mark.parametrize("model", ["CPU", "H200"])
def test_each_fact_of_verify_as_json_has_its_type(tmp_path, image, public, capsys, model):
    """A count is a number, several things are a list, a time has a zone, and what is not there is null."""
    gpu = model != "CPU"
    host = result_files.host("nvidia", model, driver="580.1") if gpu else result_files.host()
    release(image, tmp_path / "typed", host=host)
    command = ("verify", f"oci:{tmp_path}/typed:{STACK_ID}", "--key", public, "--max-age", "36500d", "--json")
    done = call(capsys, *command, "--device-model", model, "--driver", "580.1" if gpu else "none")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document.keys() == FACTS.keys()
    for name, wanted in FACTS.items():
        assert isinstance(document[name], wanted), name
        assert not isinstance(document[name], bool), name
    for name in ("verified_at", "valid_until"):
        assert dt.datetime.fromisoformat(document[name]).tzinfo is not None
    for name in ("signed_by", "static_only", "notes"):
        assert all(isinstance(item, str) for item in document[name]), name
    for name in ("checks", "bounds"):
        assert all(isinstance(count, int) for count in document[name].values()), name
    assert document["driver"] == ("580.1" if gpu else None)
