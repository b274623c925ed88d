"""One option is the same in every verb: its help, its place in the order, and a default that help shows."""

from collections.abc import Iterator

import pytest
import typer
from typer.core import TyperOption

from stackcheck import cli

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
def test_a_verb_lists_its_options_in_the_common_order(verb: str) -> None:
    names = [option.opts[0] for option in options(verb)]
    shared = [name for name in names if name in ORDER]
    assert shared == sorted(shared, key=ORDER.index)
    last = [name for name in names if name not in ORDER]
    assert names[: len(last)] == last, "a verb's own options come first"


def test_an_option_of_several_verbs_says_the_same_in_each() -> None:
    said: dict[str, set[str | None]] = {}
    for verb in cli.VERBS:
        for option in options(verb):
            said.setdefault(option.opts[0], set()).add(option.help)
    assert {name: len(texts) for name, texts in said.items() if len(texts) > 1} == TWO_MEANINGS


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_an_option_with_a_value_shows_its_default_or_is_required(verb: str) -> None:
    for option in options(verb):
        if not option.is_flag and not option.required:
            shows = isinstance(option.show_default, str) or (option.show_default and option.default)
            assert shows, f"{verb} {option.opts[0]}"
