"""Foreign text reaches the terminal as text: no control character of a tag, a package or a container does."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

import result_files
from small_checkout import CPU_STACK, call
from stackcheck import cli

pytestmark = pytest.mark.usefixtures("own_home", "no_disk_flushes")
Capsys = pytest.CaptureFixture[str]
ROOT = Path(__file__).resolve().parents[3]
EVIL = "\x1b]0;owned\x07\x1b[2J\rname\nfake: line\u202e\x9b31m"


@pytest.mark.parametrize(
    "write",
    [
        lambda: print(EVIL),  # noqa: T201  # as a verb does
        lambda: print(EVIL, file=sys.stderr),  # noqa: T201
        lambda: sys.stdout.write(EVIL),
        lambda: sys.stderr.writelines([EVIL]),
        lambda: typer.echo(EVIL),
        lambda: typer.echo(EVIL, err=True, color=True),
    ],
)
def test_no_verb_can_print_a_control_character_however_it_prints(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch, write: Callable[[], object]
) -> None:
    """The streams themselves hold it, so a verb that is added later holds it too."""

    def app(**_: object) -> None:
        write()
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", app)
    done = call(capsys, "anything")
    written = done.out + done.err
    assert r"\x1b]0;owned\x07" in written
    assert all(char.isprintable() or char == "\n" for char in written)


def test_only_the_job_of_a_user_writes_past_the_streams_that_take_text_alone() -> None:
    raw = re.compile(r"\.buffer\b|sys\.__std|os\.write\([12],|/dev/(tty|std)|fdopen\([12]")
    files = [path for path in (ROOT / "stackcheck").rglob("*.py") if raw.search(path.read_text())]
    assert {path.relative_to(ROOT / "stackcheck").as_posix() for path in files} <= {
        "cli/output.py",  # says so
        "cli/status.py",  # only what `screen` gives, which test_wall.py holds
        "engine/terminal.py",  # the user's own program
    }


@pytest.mark.usefixtures("fake_engine")
def test_publishing_with_a_mistyped_key_makes_no_key(small_checkout: Path, capsys: Capsys) -> None:
    assert call(capsys, "certify", CPU_STACK).code == 0
    typo = small_checkout / "typo.key"
    done = call(capsys, "publish", CPU_STACK, "--key", typo)
    assert done.code == 2
    assert not typo.exists()


def test_a_result_cannot_rewrite_what_judge_says_of_it(
    small_checkout: Path, tmp_path: Path, capsys: Capsys
) -> None:
    check = result_files.check("test_kernels.py::test_gemm", "failed", reason=EVIL)
    path = tmp_path / "result.json"
    path.write_text(json.dumps(result_files.result(check)))
    done = call(capsys, "judge", path, "--root", small_checkout)
    assert done.code == 6
    assert "\x1b" not in done.out + done.err
    assert r"\x1b]0;owned" in done.out
